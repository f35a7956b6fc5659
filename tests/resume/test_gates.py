"""gates: speed and memory in numbers, and the limits that were asked for."""

from __future__ import annotations

import pytest

from ckpttool.resume.compare.limits import PEAKS, check_gates, compute_metrics, find_peak_flops
from ckpttool.resume.compare.verdict import Report
from ckpttool.resume.report.facts import describe_load_costs
from ckpttool.resume.trace.model import Step, Trace


def run(**fields: object) -> Trace:
    out = Trace(
        world_size=8, dtype="bf16", device="cuda", parameters=8_000_000_000, global_batch=64, sequence=8192,
        load_seconds=20.0, load_bytes=96_000_000_000, roundtrip={"save_seconds": 12.5},
        environment={"gpu": "NVIDIA H100 80GB HBM3"},
        memory=[
            {"rank": 0, "allocated_bytes": 50 << 30, "reserved_bytes": 60 << 30, "total_bytes": 80 << 30},
            {"rank": 1, "allocated_bytes": 52 << 30, "reserved_bytes": 58 << 30, "total_bytes": 80 << 30},
        ],
        steps=[Step(k, 2.0, seconds=s) for k, s in enumerate((90.0, 8.0, 7.0, 9.0))],
    )  # fmt: skip
    for key, value in fields.items():
        setattr(out, key, value)
    return out


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H20", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A30", 165e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
        ("Tesla V100-SXM2-32GB", None),
        ("cpu", None),
        ("cuda", None),
        (None, None),
    ],
)
def test_a_device_has_the_peak_of_its_data_sheet_or_none(name: str | None, flops: float | None) -> None:
    assert find_peak_flops(name) == flops


def test_every_peak_says_where_it_is_published() -> None:
    assert all(len(source) > 20 for _, _, source in PEAKS)


def test_numbers_of_a_run_are_those_of_a_hand_calculation() -> None:
    found = compute_metrics(run())
    assert found == {
        "step_seconds": 8.0,  # median of 8, 7, 9; the first step is warming up
        "tokens_per_second": 64 * 8192 / 8,
        "mfu": pytest.approx(6 * 8e9 * 64 * 8192 / (8 * 8 * 989e12)),  # 0.3976
        "load_seconds": 20.0, "load_gb_per_second": 4.8, "save_seconds": 12.5,
        "reserved_gib": 60.0, "allocated_gib": 52.0, "headroom_gib": 20.0,
    }  # fmt: skip
    assert 0.397 < found["mfu"] < 0.398


def test_the_peak_is_never_guessed() -> None:
    assert "mfu" not in compute_metrics(run(environment={"gpu": "NVIDIA X900"}))
    assert "mfu" not in compute_metrics(run(environment={}))
    assert "mfu" not in compute_metrics(run(dtype="fp32"))  # with or without TF32, it is another peak
    assert "mfu" not in compute_metrics(run(dtype=None))
    assert compute_metrics(run(environment={}, dtype="fp32"), 100.0)["mfu"] == pytest.approx(
        6 * 8e9 * 64 * 8192 / 64e14
    )


def test_what_is_not_known_is_not_there() -> None:
    assert compute_metrics(Trace()) == {}
    assert "step_seconds" not in compute_metrics(run(steps=[Step(1, 2.0, seconds=3.0)]))
    found = compute_metrics(run(global_batch=None, steps=[Step(k, 2.0, tokens=100, seconds=2.0) for k in range(3)]))
    assert found["tokens_per_second"] == 50


def test_limits_are_judged_where_they_are_given() -> None:
    trace = run()
    numbers = compute_metrics(trace)
    assert check_gates(trace, numbers) == []
    checks = check_gates(
        trace, numbers, min_mfu=0.40, max_reserved_gib=60.0, max_step_seconds=8.5, max_load_seconds=19.0
    )
    assert [(c.name, c.verdict, c.bound, c.source) for c in checks] == [
        ("gate.min_mfu", "fail", 0.40, "given"), ("gate.max_reserved_gib", "pass", 60.0, "given"),
        ("gate.max_step_seconds", "pass", 8.5, "given"), ("gate.max_load_seconds", "fail", 19.0, "given"),
    ]  # fmt: skip
    assert checks[0].text == "MFU is 0.3976, at least 0.4 is required"
    assert checks[3].text == "the time of loading is 20 s, at most 19 s is required"
    assert Report(trace, None, "strict", checks).word == "gate failed"
    assert check_gates(trace, numbers, min_mfu=0.3)[0].verdict == "pass"


def test_a_limit_whose_number_cannot_be_known_fails_and_says_what_to_give() -> None:
    def text(trace: Trace, **limit: float) -> str:
        (check,) = check_gates(trace, compute_metrics(trace), **limit)  # type: ignore[arg-type]
        assert (check.verdict, check.number) == ("fail", None)
        return check.text

    assert "the peak of Tesla T4 in bf16 is not in the list; give peak_tflops" in text(
        run(environment={"gpu": "Tesla T4"}), min_mfu=0.4
    )
    assert "steps=2" in text(run(steps=[]), min_mfu=0.4)
    assert "steps=2" in text(run(steps=[Step(1, 2.0, seconds=1.0)]), max_step_seconds=1.0)
    assert "run on GPUs" in text(run(memory=[]), max_reserved_gib=1.0)
    assert "did not time the load" in text(run(load_seconds=None), max_load_seconds=1.0)
    assert "global_batch" in text(run(global_batch=None), min_mfu=0.4)
    assert "how many parameters" in text(run(parameters=None), min_mfu=0.4)


def test_the_cost_of_a_load_is_told_over_all_ranks_with_the_worst_one() -> None:
    loads = [
        {"rank": 0, "seconds": 1.0, "bytes": 3_000_000_000, "host_bytes": 2 << 30, "device_bytes": None},
        {"rank": 1, "seconds": 9.5, "bytes": 1_000_000_000, "host_bytes": 1 << 30, "device_bytes": None},
        {"rank": 2, "seconds": 2.0, "bytes": 2_000_000_000, "host_bytes": 3 << 30, "device_bytes": None},
    ]
    assert dict(describe_load_costs(loads)) == {
        "load time of a rank": "1 s, 2 s, 9.5 s (least, median, most: rank 1)",
        "bytes read by a rank": "1 GB, 2 GB, 3 GB (least, median, most: rank 0)",
        "peak host memory of a load": "1 GiB, 2 GiB, 3 GiB (least, median, most: rank 2)",
    }
    assert dict(describe_load_costs([{**loads[0], "bytes": 5_000_000, "device_bytes": 1 << 29}])) == {
        "load time of a rank": "1 s", "bytes read by a rank": "5 MB", "peak host memory of a load": "2 GiB",
        "peak device memory of a load": "0.5 GiB",
    }  # fmt: skip
    assert describe_load_costs([]) == []
