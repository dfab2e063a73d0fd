"""What a resume does with a run's folder."""

from __future__ import annotations

from sharpscope.recording.run_folder import wind_back
from sharpscope.traces import TraceWriter
from tests.traces.rows import new_run, rows
from tests.traces.test_files import damage_part


def test_a_part_that_a_resume_sets_aside_is_told_once(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2):
            writer.append("tokens", rows("tokens", step))
    (part,) = (run / "traces/tokens").iterdir()
    damage_part(part, "logit")
    (told,) = wind_back(run, 1)
    assert told.startswith(f"traces/tokens/damaged-{part.name} is set aside: its pages cannot be read")
    assert wind_back(run, 1) == []
