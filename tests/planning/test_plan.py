"""Whole plans: bills per rank, moments, ranges, offload."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_vram.planning.activations import Recompute
from pytest_vram.planning.answers import BILLS
from pytest_vram.planning.configs import from_config, named
from pytest_vram.planning.flows import summed_bytes
from pytest_vram.planning.plan import make_plan
from pytest_vram.planning.published import MODELS
from pytest_vram.planning.runs import Offload, Parallel, Setup
from pytest_vram.planning.shapes import PlanError, decoder
from pytest_vram.planning.states import OPTIMIZERS, PRECISIONS, Lora
from pytest_vram.planning.traffic import offload_traffic
from pytest_vram.sim.profiles import find_profile
from pytest_vram.sim.simulation import Simulation
from pytest_vram.trace import BILLS as LEDGER

GB = 10**9
#: Exactly 7e9 parameters are nobody's model; this one's figures are compared with its own N.
LLAMA = named("llama-7b")
N = LLAMA.parameters
PURE = PRECISIONS["bf16-pure"]


def setup(**changes):
    return Setup(LLAMA, **{"precision": PURE, "sequence": 512, **changes})


def bills(**changes):
    return make_plan(setup(**changes)).bills


def near(size):
    """Block rounding and uneven stages make a rank's share slightly larger than the quotient."""
    return pytest.approx(size, rel=2e-3)


def test_the_planner_speaks_the_ledgers_language():
    assert BILLS == LEDGER


def test_fixed_bills_of_a_whole_model():
    made = bills()
    assert made["parameters"] == near(2 * N)
    assert made["gradients"] == near(2 * N)
    assert made["master_weights"] == near(4 * N)
    assert made["optimizer_state"] == near(8 * N)


@pytest.mark.parametrize(
    ("stage", "shares"),
    [(0, (1, 1, 1, 1)), (1, (1, 1, 8, 8)), (2, (1, 8, 8, 8)), (3, (8, 8, 8, 8))],
)
def test_zero_divides_what_its_stage_says(stage, shares):
    """Rajbhandari et al. 2020, figure 1: parameters, gradients, master weights, states."""
    made = bills(parallel=Parallel(data=8, zero=stage), buckets=False)
    sizes = (2 * N, 2 * N, 4 * N, 8 * N)
    names = ("parameters", "gradients", "master_weights", "optimizer_state")
    for name, size, share in zip(names, sizes, shares, strict=True):
        assert made[name] == near(size / share), name


def test_zero_paper_figures():
    """ZeRO, figure 1: 7.5B parameters over 64 ranks: 120, 31.4, 16.6 and 1.9 GB."""
    size = 7.5e9
    table = {1: 4 * size + 12 * size / 64, 2: 2 * size + 14 * size / 64, 3: 16 * size / 64}
    assert 16 * size / GB == 120
    assert [round(table[stage] / GB, 1) for stage in (1, 2, 3)] == [31.4, 16.6, 1.9]
    plan = make_plan(setup(parallel=Parallel(data=64, zero=3)))
    assert plan.fixed == near(16 * N / 64)


def test_tensor_parallelism_cuts_matrices_and_leaves_norms():
    made = bills(parallel=Parallel(tensor=4))
    norms = 65 * 4096
    assert made["parameters"] == near(2 * ((N - norms) / 4 + norms))


def test_pipeline_stages_hold_their_layers_and_up_to_p_micro_batches():
    """1F1B: the first of p stages holds min(p, m) micro-batches of its layers' activations."""
    large = {"batch": 32, "sequence": 2048, "step": "fused"}
    layers = (N - 2 * 32000 * 4096) / 4
    kept = {}
    for micro_batches in (1, 2, 4, 16):
        stages = Parallel(pipeline=4)
        first = make_plan(setup(accumulation=micro_batches, parallel=stages, **large))
        assert first.bills["parameters"] == near(2 * (layers + 32000 * 4096))
        kept[micro_batches] = first.moments[0].bills["activations"]
    whole = make_plan(setup(**large)).moments[0].bills["activations"]
    assert kept[2] == 2 * kept[4] / 4
    assert kept[16] == kept[4]
    assert kept[4] == pytest.approx(whole, rel=0.05)  # all layers' worth, but for the head's


def test_context_parallelism_divides_activations():
    whole, half = (make_plan(setup(parallel=Parallel(context=c))) for c in (1, 2))
    ratio = whole.bills["activations"] / half.bills["activations"]
    assert ratio == pytest.approx(2, rel=0.01)
    assert whole.bills["parameters"] == half.bills["parameters"]


def test_expert_parallelism_divides_experts():
    shape = named("mixtral-8x7b")
    experts = sum(w.total for w in shape.weights() if w.role == "expert")
    base = {"precision": PURE, "sequence": 512}
    made = make_plan(Setup(shape, parallel=Parallel(expert=4), **base)).bills["parameters"]
    assert made == near(2 * (shape.parameters - experts * 3 / 4))


def test_ddp_buckets_copy_the_gradients_unless_they_are_views():
    copies = bills(parallel=Parallel(data=4))["other"]
    assert copies == near(2 * N)
    assert bills(parallel=Parallel(data=4), buckets=False)["other"] == 0


def test_lora_trains_adapters_only():
    plan = make_plan(setup(lora=Lora(8), precision=PRECISIONS["bf16-plain"]))
    assert plan.trainable == 4_194_304
    assert plan.bills["gradients"] == 4_194_304 * 4
    assert plan.bills["optimizer_state"] == 4_194_304 * 8
    assert plan.bills["parameters"] == near(2 * N + 4 * 4_194_304)


def test_qlora_keeps_the_matrices_in_four_bits():
    plan = make_plan(
        setup(lora=Lora(8), quantisation="nf4-double", precision=PRECISIONS["bf16-plain"])
    )
    matrices = sum(w.total for w in LLAMA.weights() if w.role == "matrix")
    rest = N - matrices
    per = 0.5 + 1 / 64 + 4 / (64 * 256)
    assert plan.bills["parameters"] == near(matrices * per + 2 * rest + 4 * 4_194_304)


def test_the_peak_is_a_moment_and_the_textbook_a_sum():
    plan = make_plan(setup())
    assert plan.peak == max(moment.total for moment in plan.moments)
    assert plan.peak_moment.name == "optimizer step"
    fused = make_plan(setup(step="fused"))
    assert fused.peak < plan.peak
    assert plan.textbook == sum(v for k, v in plan.bills.items() if k != "temporary")


def test_accumulation_keeps_gradients_through_the_forward_pass():
    """It saves nothing at a fixed micro-batch, and makes gradients live longer."""
    once, often = (make_plan(setup(accumulation=m)) for m in (1, 4))
    assert once.moments[0].bills["gradients"] == 0
    assert often.moments[0].bills["gradients"] == near(2 * N)
    assert often.moments[0].bills["activations"] == once.moments[0].bills["activations"]
    big = make_plan(setup(batch=4))
    assert big.moments[0].bills["activations"] > 3.9 * once.moments[0].bills["activations"]


def test_autocast_caches_each_matrix_and_the_head():
    plan = make_plan(setup(precision=PRECISIONS["bf16"]))
    cast = sum(w.total for w in LLAMA.weights() if w.role in ("matrix", "head"))
    assert plan.bills["autocast_cache"] == near(2 * cast)
    assert make_plan(setup(precision=PRECISIONS["fp32"])).bills["autocast_cache"] == 0


def test_fp8_adds_two_bytes_per_matrix_element():
    plan = make_plan(setup(precision=PRECISIONS["fp8"]))
    inner = sum(w.total for w in LLAMA.weights() if w.role == "matrix")
    assert plan.bills["autocast_cache"] == near(2 * inner)
    assert plan.bills["master_weights"] == near(4 * N)


def test_full_recomputation_keeps_inputs_and_one_layer():
    plain, full = (make_plan(setup(recompute=r)) for r in (Recompute(), Recompute("full")))
    moment = {m.name: m for m in full.moments}["backward, in the last layer"]
    inputs = 32 * 512 * 4096 * 2
    assert full.moments[0].bills["activations"] < plain.moments[0].bills["activations"] / 4
    assert moment.bills["activations"] > inputs


def test_offload_traffic_of_seven_billion_parameters():
    """8-bit m and v and a master copy: 12 bytes a parameter both ways, 84 GB and 4.2 s for 7B."""
    plan = make_plan(
        setup(optimizer=OPTIMIZERS["adamw8bit"], offload=Offload(frozenset({"optimizer"})))
    )
    traffic = offload_traffic(plan)
    scales = 2 * 2 * 4 / 256
    assert traffic.total == pytest.approx((12 + scales) * N, rel=1e-6)
    assert round(12 * 7e9 / GB) == 84
    assert 12 * 7e9 / 20e9 == 4.2
    assert traffic.seconds == traffic.total / 20e9
    assert plan.bills["optimizer_state"] == 0


def test_a_step_on_the_cpu_moves_gradients_and_parameters():
    away = Offload(frozenset({"optimizer"}), step_on="cpu")
    plan = make_plan(setup(offload=away))
    traffic = offload_traffic(plan)
    assert (traffic.down, traffic.up) == (2 * N, 2 * N)
    assert plan.bills["master_weights"] == 0


def test_paged_states_are_a_range():
    plan = make_plan(setup(optimizer=OPTIMIZERS["paged-adamw"]))
    paged = {item.name: item for item in plan.assumptions}["paged optimizer"]
    assert plan.bills["optimizer_state"] == 0
    assert paged.high == near(8 * N)
    assert plan.dominating is paged


def test_ranges_enclose_the_peak():
    plan = make_plan(setup())
    assert plan.low < plan.peak < plan.high
    assert plan.dominating.name == "fragmentation"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch": 0}, "batch must be at least 1, not 0"),
        ({"sequence": -5}, "sequence must be at least 1, not -5"),
        ({"dropout": 1.5}, "dropout is a share between 0 and 1"),
        ({"quantisation": "nf4"}, "quantised weights cannot be trained: add LoRA"),
        ({"parallel": Parallel(tensor=5)}, "32 heads do not divide over 5 tensor ranks"),
        ({"parallel": Parallel(pipeline=64)}, "64 pipeline stages for 32 layers"),
    ],
)
def test_impossible_runs_are_refused(changes, sentence):
    with pytest.raises(PlanError, match=sentence):
        setup(**changes)


def test_more_impossibilities():
    with pytest.raises(PlanError, match="ZeRO has stages 0 to 3, not 4"):
        Parallel(zero=4)
    with pytest.raises(PlanError, match="data parallel degree must be at least 1"):
        Parallel(data=0)
    with pytest.raises(PlanError, match="cannot offload 'gradients'"):
        Offload(frozenset({"gradients"}))
    gpt2 = named("gpt2")
    with pytest.raises(PlanError, match="gpt2 has 1024 positions, not 2048"):
        Setup(gpt2, sequence=2048)


def test_a_model_of_every_kind_can_be_planned():
    for name in ("bert-base", "vit-base", "mixtral-8x7b", "qwen2.5-7b"):
        plan = make_plan(Setup(named(name), batch=2, sequence=128))
        assert plan.peak > 0
    moe = decoder(layers=2, hidden=64, heads=4, vocab=100, experts=4)
    assert make_plan(Setup(moe, sequence=16)).trainable == moe.parameters


def test_inputs_are_ids_and_labels_or_pixels():
    assert bills(batch=3)["inputs"] == 2 * 3 * 512 * 8
    vit = make_plan(Setup(named("vit-base"), batch=2))
    assert vit.bills["inputs"] == 2 * (3 * 224 * 224 * 4 + 8)


def test_loop_and_foreach_temporaries():
    largest = 32000 * 4096
    plain = setup(precision=PRECISIONS["fp32"])
    steps = {
        name: {m.name: m for m in make_plan(replace(plain, step=name)).moments}["optimizer step"]
        for name in ("foreach", "fused", "loop")
    }
    assert steps["foreach"].bills["temporary"] == near(4 * N)
    assert steps["fused"].bills["temporary"] == 0
    assert steps["loop"].bills["temporary"] == 2 * largest * 4


@pytest.mark.parametrize(
    ("rows", "columns", "size"),
    [  # by the rule of Reduce.cuh for an A100: 108 multiprocessors with 2048 threads
        (512, 3072, 0),
        (2048, 768, 8 * 2048 * 768),
        (9232, 2048, 512 * 108 * 2048),
        (65536, 4096, 65536 * 4096 // 2),
        (16384, 50257, 0),
    ],
)
def test_scratch_of_a_biases_gradient(rows, columns, size):
    assert summed_bytes(rows, columns, 108 * 2048) == size


@pytest.mark.parametrize("card", ["a100-80gb", "h100-80gb", "t4"])
def test_scratch_is_what_the_simulated_kernel_takes(card):
    torch = pytest.importorskip("torch")
    profile = find_profile(card)
    threads = profile.multiprocessors * profile.threads_per_multiprocessor
    for rows, columns in ((2048, 768), (9232, 2048), (65536, 4096), (2048, 30522), (16384, 50257)):
        with Simulation(profile):
            values = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            total = values.sum(0)
            taken = torch.cuda.max_memory_allocated() - before - total.numel() * 2
        planned = summed_bytes(rows, columns, threads)
        assert taken == pytest.approx(planned, rel=0.01, abs=2048)


@pytest.mark.parametrize(
    ("parallel", "note"),
    [
        (Parallel(zero=3), "ZeRO-3 shards over data-parallel ranks, and there is one (--data)"),
        (
            Parallel(sequence=True),
            "sequence parallelism works among tensor-parallel ranks, and there is one (--tensor)",
        ),
        (Parallel(expert=2), "expert parallelism divides experts, and this model has none"),
    ],
)
def test_options_that_do_nothing_are_named(parallel, note):
    assert make_plan(setup(parallel=parallel)).notes == (note,)
    used = {**dict.fromkeys(("data", "tensor"), 2), "zero": 3, "sequence": True}
    assert make_plan(setup(parallel=Parallel(**used))).notes == ()


def test_autocast_over_sharded_weights_has_a_better_way():
    parallel = Parallel(data=8, zero=3)
    plan = make_plan(setup(parallel=parallel, precision=PRECISIONS["bf16"]))
    assert plan.notes == (
        "autocast caches a 16-bit copy of every gathered weight (FSDP2's are leaves); FSDP's own "
        "mixed precision, planned as bf16-pure, keeps none",
    )
    assert make_plan(setup(parallel=parallel)).bills["autocast_cache"] == 0


def test_adapters_on_experts_in_one_tensor():
    """Rank r for each of gate and up and for down, of every expert: as peft makes them."""
    shape = named("mixtral-8x7b")
    plan = make_plan(Setup(shape, lora=Lora(8, ("up", "down")), precision=PRECISIONS["bf16-plain"]))
    assert plan.trainable == 32 * 8 * (16 * (4096 + 2 * 14336) + 8 * (14336 + 4096))


def test_a_guessed_architecture_is_a_range():
    """Without the gate of its feed-forward blocks a model has less of everything."""
    config = {**MODELS["llama-7b"], "model_type": "newllm", "architectures": ["NewForCausalLM"]}
    guessed = make_plan(Setup(from_config(config), precision=PURE))
    known = make_plan(Setup(LLAMA, precision=PURE))
    assert guessed.peak == known.peak
    gates = 32 * 4096 * 11008
    low = {item.name: item.low for item in guessed.assumptions}["architecture"]
    assert low <= -16 * gates
    assert guessed.low < known.low


def test_sharded_training_gathers_the_experts_of_its_own_rank():
    """ZeRO-3: two layers in 16 bits and one layer's gradient. A layer of Mixtral has 8 experts of
    3 x 4096 x 14336 parameters; each of 8 expert ranks gathers one."""
    shape = named("mixtral-8x7b")
    experts = 8 * 3 * 4096 * 14336
    assert shape.largest_layer() - shape.largest_layer(8) == experts - experts // 8
    sharded = [
        make_plan(Setup(shape, precision=PRECISIONS["bf16-pure"], parallel=parallel)).bills["other"]
        for parallel in (Parallel(data=8, zero=3), Parallel(data=8, zero=3, expert=8))
    ]
    assert sharded[0] - sharded[1] == (2 * 2 + 2) * (experts - experts // 8)


@pytest.mark.parametrize(("name", "limit"), [("bart-large", 1024), ("albert-base-v2", 512)])
def test_tables_of_positions_counted_apart_limit_the_sequence_too(name, limit):
    assert make_plan(Setup(named(name), sequence=limit)).peak
    with pytest.raises(PlanError, match=f"{name} has {limit} positions, not {limit + 1}"):
        Setup(named(name), sequence=limit + 1)
