"""Why a tick was long: parts of it that were measured, then what happened in it."""

from bench.serving.run import Tick

NOTABLE = 0.2
"""Part of a tick from which on a measured time is a cause."""

UNKNOWN = "unknown"


def causes_of(tick: Tick, usual_off_cpu: float = 0.0) -> tuple[str, ...]:
    """Likeliest first.

    Measured are an injected stall, Python's garbage collector ("gc"), and time during which the
    process did not compute ("host": others had the machine, or a page fault). Then comes what the
    engine itself says, or, if it says nothing, what happened in the tick: prompt tokens
    ("prefill"), preempted sequences ("preemption"), blocks copied on write ("cow"), sequences that
    began or ended ("join", "leave"), K/V memory that grew ("growth").

    Args:
        usual_off_cpu: part of a usual tick of the run during which the process did not compute; on
            a busy machine that much is nothing special.
    """
    off_cpu_ms = tick.off_cpu_ms - usual_off_cpu * tick.tick_ms
    parts = {"injected stall": tick.stall_ms, "gc": tick.gc_ms, "host": off_cpu_ms}
    measured = [
        name
        for name, ms in sorted(parts.items(), key=lambda part: -part[1])
        if ms >= NOTABLE * tick.tick_ms
    ]
    named = measured + list(tick.causes or _events(tick))
    return tuple(dict.fromkeys(named)) or (UNKNOWN,)


def _events(tick: Tick) -> tuple[str, ...]:
    happened = {
        "prefill": tick.prompt_tokens > 0,
        "preemption": tick.preemptions > 0,
        "cow": tick.cow_clones > 0,
        "join": tick.joined > 0,
        "leave": tick.left > 0,
        "growth": tick.grown_bytes > 0,
    }
    return tuple(name for name, did in happened.items() if did)
