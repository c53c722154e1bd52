"""Observer: finds out by itself what a training test does, and tells a Recorder."""

from pytest_vram.observe.observer import Observer

__all__ = ["Observer"]
