"""A rank that died or stands still, seen by the others: torch's errors in, one message with what to do out."""

from __future__ import annotations

import os

import torch.distributed as torch_dist

SIGNS = ("/gloo/", "connection closed by peer", "connection reset by peer", "broken pipe")  # gloo raises plain RuntimeErrors


class RankLost(Exception):
    """Another rank ended, or did not answer in time."""


def lost_rank(error: RuntimeError, timeout_s: int) -> RankLost | None:
    """What to tell the user if an error is that of a collective; None if it is anything else."""
    text = str(error).lower()
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    if not isinstance(error, torch_dist.DistError) and not any(sign in text for sign in SIGNS):
        return None
    if ("timed out" in text or "timeout" in text) and "timed out connecting" not in text:
        what = (
            f"waited {timeout_s} s for another rank, which stands still or never started. Look at the last lines of every rank "
            f"(torchrun --log-dir DIR --tee 3 keeps them) and whether its machine, disk and GPU answer; where a step or a chore "
            f"may take so long, raise engine.timeout_s (`tessera resume RUN --set engine.timeout_s=N`)"
        )
    else:
        what = "lost another rank, which ended first: its own last lines say why (torchrun --log-dir DIR --tee 3 keeps them)"
    lost = RankLost(f"rank {os.environ.get('RANK', '0')} {what}. The last checkpoint is intact")
    for note in getattr(error, "__notes__", []):
        lost.add_note(note)
    return lost
