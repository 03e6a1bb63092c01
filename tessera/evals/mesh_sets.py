"""Two sets of shapes, by their distances: coverage and minimum matching distance (Achlioptas et al. 2018, section 3), and the
accuracy of the nearest neighbour (1-NNA; Lopez-Paz and Oquab 2017; for shapes Yang et al. 2019, PointFlow, section 5.1).

Enter: matrices of any distance, here Chamfer. G are the generated shapes, R the reference, both of one size for figures that
compare: coverage grows and matching distance falls with the number of samples alone. None has a meaning by itself: the row of
training shapes in the place of samples says what real shapes reach.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessera.evals.mesh_points import Clouds, Doubles, pairwise_chamfer
from tessera.randomness import mix_text, permute


@dataclass(frozen=True, slots=True)
class SetScores:
    """One row: a set against the reference."""

    coverage: float  # in [0, 1], higher is better
    mmd: float  # >= 0, lower is better; in the unit of the distance
    nna: float  # in [0, 1]: nearest to `chance` is best; 1: told apart always; far below: each shape has a twin on the other side
    nna_samples: float  # the part of the samples: high where they crowd together
    nna_reference: float  # the part of the reference: high where no samples come near
    chance: float  # what 1-NNA is on average where both sides are one distribution: (n - 1) / (2 n - 1) for n a side
    num_samples: int
    num_reference: int

    def as_dict(self) -> dict[str, float]:
        """Plain JSON."""
        return asdict(self)


def coverage(across: Doubles) -> float:
    """G R -> |{argmin_R D(g, r) : g in G}| / |R|, the share of the reference that is the nearest of some sample.

    Where several are equally near, all are: duplicates in the reference are covered together, and a set covers itself whole.
    """
    _refuse_empty(across)
    return float((across == across.min(1, keepdims=True)).any(0).mean())


def minimum_matching_distance(across: Doubles) -> float:
    """G R -> 1/|R| sum over R of min_G D(g, r): how near the samples come to each shape of the reference."""
    _refuse_empty(across)
    return float(across.min(0).mean())


def own_neighbours(within: Doubles, across: Doubles) -> Doubles:
    """n n, n m -> n: 1 where the nearest of all other shapes is of the own set, 0 where of the other; equally near ones share it.

    A shape is not its own neighbour, so the diagonal is not looked at; a twin of it is.
    """
    if within.shape != (len(across), len(across)):
        raise ValueError(f"distances within a set are shaped {within.shape}, to the other {across.shape}; expected n n and n m")
    others = within.copy()
    np.fill_diagonal(others, np.inf)
    nearest = np.minimum(others.min(1), across.min(1))[:, None]
    own, other = (others == nearest).sum(1), (across == nearest).sum(1)
    return own / (own + other)


def nearest_neighbour_accuracy(samples: Doubles, reference: Doubles, across: Doubles) -> float:
    """G G, R R, G R -> (sum over G [N(g) in G] + sum over R [N(r) in R]) / (|G| + |R|), leaving each shape itself out."""
    _refuse_empty(across)
    return float(np.concatenate([own_neighbours(samples, across), own_neighbours(reference, across.T)]).mean())


def chance_accuracy(num_samples: int, num_reference: int) -> float:
    """1-NNA on average, where nothing but the label tells the sets apart: the share of pairs that lie in one set."""
    total = num_samples + num_reference
    return (num_samples * (num_samples - 1) + num_reference * (num_reference - 1)) / (total * (total - 1))


def score_sets(samples: Doubles, reference: Doubles, across: Doubles) -> SetScores:
    """All of it from the three matrices: G G, R R, G R."""
    return SetScores(
        coverage=coverage(across),
        mmd=minimum_matching_distance(across),
        nna=nearest_neighbour_accuracy(samples, reference, across),
        nna_samples=float(own_neighbours(samples, across).mean()),
        nna_reference=float(own_neighbours(reference, across.T).mean()),
        chance=chance_accuracy(*across.shape),
        num_samples=across.shape[0],
        num_reference=across.shape[1],
    )


def set_rows(sides: dict[str, Clouds], reference: Clouds, *, device: torch.device | str = "cpu") -> dict[str, SetScores]:
    """A row for each side against one reference, whose own distances are computed once, as are those of equal sides: a tokenizer
    that loses nothing makes what is real."""
    inside = pairwise_chamfer(reference, device=device)
    found: dict[str, SetScores] = {}
    for name, side in sides.items():
        equal = [row for other, row in found.items() if np.array_equal(sides[other], side)]
        if equal:
            found[name] = equal[0]
            continue
        within, across = pairwise_chamfer(side, device=device), pairwise_chamfer(side, reference, device=device)
        found[name] = score_sets(within, inside, across)
    return found


def draw(size: int, num: int, seed: int) -> npt.NDArray[np.int64]:
    """At most num of range(size), without repeats."""
    return permute(np.arange(min(num, size)), size, mix_text(f"mesh sets {seed}"))


def size_note(row: SetScores) -> str | None:
    """What a reader must know where the two sides differ in number."""
    if row.num_samples == row.num_reference:
        return None
    return (
        f"{row.num_samples} samples against {row.num_reference} reference shapes: coverage and matching distance depend on the "
        f"number of samples, and 1-NNA is {row.chance:.3f} by chance; take equal numbers to compare with others"
    )


def _refuse_empty(across: Doubles) -> None:
    if across.ndim != 2 or 0 in across.shape:
        raise ValueError(f"distances are shaped {across.shape}; expected samples x reference, one or more of each")
