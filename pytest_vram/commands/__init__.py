"""The commands of ``pytest-vram``, one module each; each offers ``command``."""
