"""What this library writes into traces and reads from them: names of ranges, and keys of the metadata."""

from __future__ import annotations

OWN_WORK = "instrument (own work)"  # the library's own work during a recorded step
OVERLAPPING = "instrument (overlapping regions)"  # shown on a GPU's lane where a region's own name cannot be
STEP_PREFIX = "ProfilerStep#"  # of the range of a step, as torch.profiler names it; the number follows

COMMAND = "instrument_run"  # "1" if `instrument run` recorded the program
CORES = "instrument_cores"  # the CPUs that the program may use
DETAIL = "instrument_detail"  # what was recorded, as `detail=` names it
MACHINE = "instrument_machine"  # the same for all processes of a machine until it starts again
MERGE = "instrument_merge"  # what a merged trace says of its ranks
OPENED_BY = "instrument_opened_by"  # why the window was opened
SAMPLES = "instrument_samples"  # how many samples the process took in a step
SLIM = "instrument_slim"  # what a slim trace says of the file that it was made from
STEPS = "instrument_steps"  # the first and the last step of the window: "3-5"
TASKS = "instrument_tasks"  # which asyncio task each region belongs to
UNRECORDED = "instrument_unrecorded"  # how many calls of each region were not recorded
