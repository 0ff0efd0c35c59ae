"""The summary numbers: right on rows whose answer is known, absent where nothing was measured, fast on a large job."""

from __future__ import annotations

import math
import time

import pytest
from controller_samples import make_recording, make_row, make_run

from harness.record import Recording
from harness.report import figures
from harness.report.figures import percentile, rank_figures, summarise


def test_warm_up_is_left_out_of_times_but_not_of_peaks() -> None:
    recording = make_recording(
        0, 40, wall_s=lambda i: 5.0 if i < 4 else 0.01, rss_bytes=lambda i: 900 if i == 0 else 100, data_s=lambda i: 0.0025
    )
    found = rank_figures(0, recording)
    assert found.peak_rss_bytes == 900
    assert found.num_timed == 36  # a tenth of 40 steps is the warm-up
    assert found.step_p95_s == pytest.approx(0.01)
    assert found.samples_per_s == pytest.approx(3200)
    assert found.data_share == pytest.approx(0.25)


def test_losses_are_the_first_and_last_that_were_seen() -> None:
    recording = make_recording(0, 10, loss=lambda i: math.nan if i in (0, 9) else float(i))
    found = rank_figures(0, recording)
    assert (found.first_loss, found.last_loss) == (1.0, 8.0)


def test_nothing_measured_is_none_and_not_zero() -> None:
    found = rank_figures(0, Recording("0-1-1"))
    assert (found.num_steps, found.last_loss, found.peak_rss_bytes, found.step_p50_s, found.samples_per_s) == (0, None, None, None, None)
    assert not rank_figures(3, None).reported
    summary = summarise(make_run([]))
    assert summary["loss"] == {"first": None, "last": None, "reference_last": None}
    assert summary["memory"]["peak_rss_bytes"] is None
    assert summary["throughput"]["samples_per_s"] is None


def test_few_steps_are_not_timed() -> None:
    assert rank_figures(0, make_recording(0, 7)).step_p50_s is None
    assert rank_figures(0, make_recording(0, 8)).step_p50_s is not None


def test_a_torn_last_row_is_dropped() -> None:
    recording = make_recording(0, 20)
    recording.rows += make_row(20)[:100]
    assert rank_figures(0, recording).num_steps == 20


def test_not_finite_losses_do_not_break_the_summary() -> None:
    run = make_run([make_recording(0, loss=math.inf), make_recording(1, loss=-math.inf)])
    assert summarise(run)["loss"]["last"] is None


def test_the_whole_run() -> None:
    slow = make_recording(1, wall_s=0.02, rss_bytes=500 * 2**20)
    summary = summarise(make_run([make_recording(0), slow], reference=make_run([make_recording(0, world=1)])))
    assert summary["num_steps"] == 40
    assert (summary["memory"]["peak_rss_rank"], summary["memory"]["sum_peak_rss_bytes"]) == (1, 800 * 2**20)
    assert summary["throughput"]["samples_per_s"] == pytest.approx(3200 + 1600)
    assert summary["throughput"]["speedup"] == pytest.approx(1.5)
    assert summary["throughput"]["step_p50_s"] == pytest.approx(0.015)


def test_what_the_probe_could_not_look_at_is_told() -> None:
    assert summarise(make_run())["probe"]["num_errors"] == 0
    recording = make_recording(0, more=[{"k": "probe_error", "t": 1, "s": 0, "where": "sensor ddp", "error": "AttributeError('x')"}])
    probe = summarise(make_run([recording]))["probe"]
    assert (probe["num_errors"], probe["first_error"]) == (1, "sensor ddp: AttributeError('x')")


def test_percentile_interpolates() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([7.0], 95) == 7.0


def test_what_the_ranks_said_of_themselves() -> None:
    run = make_run()
    assert figures.versions(run)["version"] == "2.14.1"
    assert (figures.devices(run), figures.backend(run)) == ("cpu", "gloo")


def test_ranks_of_a_launcher_of_the_scripts_own_name_their_torch_when_they_join() -> None:
    joined = {"k": "pg", "t": 1, "s": 0, "done": True, "rank": 0, "world_size": 1, "torch": "2.14.1+cpu"}
    recording = make_recording(0, more=[joined])
    recording.events = [e for e in recording.events if e.kind != "torch"]
    assert figures.versions(make_run([recording]))["version"] == "2.14.1+cpu"


def test_a_thousand_ranks_take_seconds_at_most() -> None:
    rows = b"".join(make_row(i) for i in range(1000))
    ranks = [Recording(f"0-{i}-1", rows=rows) for i in range(100)]
    before = time.process_time()
    for rank, recording in enumerate(ranks):
        rank_figures(rank, recording)
    assert time.process_time() - before < 1.0  # a tenth of 1,024 ranks x 1,000 steps, whose bar is 10 s with all checks
