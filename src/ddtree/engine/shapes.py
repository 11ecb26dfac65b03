"""For which shapes rounds on a GPU are made, and which of them before the first request."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddtree.engine.round import Lane
from ddtree.kernels.build import MOST_RANKS, MOST_ROWS

_ENDS = 8  # end ids of a captured batch; more make one of 16, 32, ...


@dataclass(frozen=True)
class Shape:
    """What a captured round is made for."""

    batch: int
    width: int  # rows
    depth: int
    ranks: int
    shadows: bool
    ends: int
    context: bool = False  # whether any sequence drafts from its own text

    @classmethod
    def of(cls, lanes: Sequence[Lane], size: int, ends: int = 0) -> "Shape":
        """For `size` sequences such as these, which have up to `ends` end ids."""
        return cls(
            batch=bucket(size),
            width=max(lane.rows for lane in lanes),
            depth=max(lane.depth for lane in lanes),
            ranks=max(lane.ranks for lane in lanes),
            shadows=any(lane.mode.shadows for lane in lanes),
            ends=bucket(max(_ENDS, ends)),
            context=any(lane.text is not None for lane in lanes),
        )

    @property
    def fits(self) -> bool:
        """Whether the kernels can lay it."""
        return self.width <= MOST_ROWS and self.ranks <= MOST_RANKS


def bucket(size: int) -> int:
    """Batches, and their lists of end ids, are padded to powers of two."""
    return 1 << (size - 1).bit_length()


def buckets(most: int) -> list[int]:
    """The padded sizes of batches of up to `most` sequences, the largest first."""
    return [1 << power for power in reversed(range(bucket(most).bit_length()))]


def prepared_shapes(lane: Lane, most: int) -> list[Shape]:
    """What rounds of up to `most` sequences such as this one are captured for, the largest first: the smaller ones
    find their memory there. None for a round beyond the kernels.
    """
    shapes = [Shape.of([lane], size) for size in buckets(most)]
    return [shape for shape in shapes if shape.fits]
