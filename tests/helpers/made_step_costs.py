"""What steps cost on a machine that doesn't exist."""

from midfill.system.machine import describe_machine
from midfill_lab.bench.serving.step_costs import StepCosts

STEP_COSTS = StepCosts(
    model="tiny",
    machine=describe_machine(),
    engine="made-up",
    slots=32_768,
    slot_bytes=1024,
    rows=(0.004, 0.0045, 0.005, 0.006, 0.008, 0.012, 0.02, 0.036, 0.07),
    output=1e-4,
    request=1e-5,
    key_read=1e-7,
    key_pair=1e-8,
    request_seconds=0.002,
)
