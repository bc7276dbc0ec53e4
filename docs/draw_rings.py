"""Draw the pictures of docs/overlap.md into docs/pictures: `python docs/draw_rings.py`.

Plain SVG, so that the pictures are text in the repository and nothing has to be installed. Each
draws what the code of `drumline.parallel.rings` does on four devices, step by step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PICTURES = Path(__file__).with_name("pictures")
DEVICES = 4
# One colour for each owner, told apart also without red and green; letters say the same.
COLOURS = ("#4e79a7", "#f28e2b", "#76b7b2", "#b07aa1")
WAITING = "#d7d7d7"
INK, PALE = "#222222", "#767676"
CELL, GAP, LEFT, TOP = 92, 34, 96, 64


@dataclass
class Drawing:
    """Shapes in the order in which they are painted."""

    width: int
    height: int
    shapes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}"/>'
        )

    def text(self, x: float, y: float, words: str, *, size: int = 13, fill: str = INK) -> None:
        """Words centred on a point."""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" '
            f'text-anchor="middle">{words}</text>'
        )

    def note(self, x: float, y: float, words: str) -> None:
        """Words that begin at a point."""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" font-size="13" fill="{INK}">{words}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A thin arrow."""
        self.shapes.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{PALE}" '
            'stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The whole file."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="sans-serif">',
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{PALE}"/>'
            "</marker></defs>",
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>',
            *self.shapes,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def source(device: int, step: int, shift: int) -> int:
    """Whose shard is on a device after so many hops of `shift` devices each."""
    return (device - shift * step) % DEVICES


def owner(device: int, step: int, shift: int) -> int:
    """Whose sum a device adds to at a step: its own at the last one."""
    return (device - shift * (step + 1)) % DEVICES


def gather() -> str:
    """`allgather_matmul`, one way."""
    picture = _grid("step {} of 4", below=2)
    for device, step, x, y in _cells():
        here = source(device, step, 1)
        picture.box(x, y, CELL, CELL - 28, COLOURS[here])
        picture.text(x + CELL / 2, y + 27, f"A{here}", size=18, fill="#ffffff")
        picture.text(x + CELL / 2, y + 49, f"× W rows {here}", size=12, fill="#ffffff")
    _hops(picture, 1)
    _caption(
        picture,
        "Each device multiplies the chunk of A that is here with the rows of W that belong to it,",
        "while the same chunk already travels on to the next device.",
    )
    return picture.svg()


def scatter() -> str:
    """`matmul_reducescatter`, one way."""
    picture = _grid("step {} of 4", below=2)
    for device, step, x, y in _cells():
        whose = owner(device, step, 1)
        picture.box(x, y, CELL, CELL - 28, COLOURS[whose])
        picture.text(x + CELL / 2, y + 27, f"sum {whose}", size=18, fill="#ffffff")
        for term in range(DEVICES):
            left = x + CELL / 2 - 39 + 20 * term
            picture.box(left, y + 40, 18, 12, "#ffffff" if term <= step else "#00000033")
    _hops(picture, 1)
    _caption(
        picture,
        "A sum sets out beyond its owner and gains one term (white) on every device; at the last",
        "step each device adds the fourth to the sum that is its own. Nothing else is ever sent.",
    )
    return picture.svg()


def both_ways() -> str:
    """`allgather_matmul`, both ways."""
    picture = _grid("step {} of 4", below=2)
    for device, step, x, y in _cells():
        half = (CELL - 32) / 2
        for number, shift in enumerate((1, -1)):
            here = source(device, step, shift)
            top = y + number * (half + 4)
            picture.box(x, top, CELL, half, COLOURS[here])
            part = ("upper", "lower")[number]
            picture.text(x + CELL / 2, top + 20, f"A{here} {part}", size=13, fill="#ffffff")
    _hops(picture, 1, at=15)
    _hops(picture, -1, at=CELL - 43)
    _caption(
        picture,
        "The upper rows of every chunk go down the ring, the lower rows up: each direction of a",
        "link carries half of the bytes.",
    )
    return picture.svg()


def timeline() -> str:
    """A gather-matmul in time, gathered first and on the ring."""
    unit, bar = 118, 34
    picture = Drawing(LEFT + 5 * unit + 50, 300)
    link_first = 2.1
    for y, words in ((54, "multiply"), (98, "link"), (176, "multiply"), (220, "link")):
        picture.text(LEFT / 2 + 4, y + 22, words, fill=PALE)
    picture.note(LEFT, 40, "gather first, then multiply")
    picture.box(LEFT, 98, link_first * unit, bar, WAITING)
    picture.text(LEFT + link_first * unit / 2, 120, "all-gather of A")
    picture.box(LEFT + link_first * unit, 54, 2.9 * unit, bar, COLOURS[0])
    picture.text(LEFT + (link_first + 1.45) * unit, 76, "A × W", fill="#ffffff")
    picture.note(LEFT, 166, "on the ring")
    for step in range(DEVICES):
        x = LEFT + step * 0.8 * unit
        picture.box(x, 176, 0.78 * unit, bar, COLOURS[source(0, step, 1)])
        words = f"A{source(0, step, 1)} × W"
        picture.text(x + 0.39 * unit, 198, words, fill="#ffffff")
        if step < DEVICES - 1:
            picture.box(x, 220, 0.6 * unit, bar, WAITING)
            picture.text(x + 0.3 * unit, 242, f"hop {step + 1}")
    picture.note(
        LEFT, 284, "A hop is hidden as long as it takes no longer than the product beside it."
    )
    return picture.svg()


def _grid(title: str, *, below: int) -> Drawing:
    """The frame of a picture: a column for each step and a row for each device."""
    width = LEFT + DEVICES * (CELL + GAP) + 40
    picture = Drawing(max(width, 640), TOP + DEVICES * CELL + 22 * below + 6)
    for step in range(DEVICES):
        x = LEFT + step * (CELL + GAP) + CELL / 2
        picture.text(x, TOP - 24, title.format(step + 1), fill=PALE)
    for device in range(DEVICES):
        picture.text(LEFT / 2, TOP + device * CELL + 36, f"device {device}", fill=PALE)
    return picture


def _cells() -> Iterator[tuple[int, int, float, float]]:
    for device in range(DEVICES):
        for step in range(DEVICES):
            yield device, step, LEFT + step * (CELL + GAP), TOP + device * CELL


def _hops(picture: Drawing, shift: int, *, at: float = (CELL - 28) / 2) -> None:
    """Arrows from each cell to the next step's cell of the device that it is sent to."""
    for device, step, x, y in _cells():
        to = device + shift
        if step == DEVICES - 1:
            continue
        begin, end = x + CELL + 3, x + CELL + GAP - 3
        middle = y + at
        if 0 <= to < DEVICES:
            picture.arrow(begin, middle, end, middle + shift * CELL)
        else:
            # Round the ring: out of the picture on this side, and in again on the other.
            picture.arrow(begin, middle, x + CELL + GAP / 2, middle + shift * 34)
            again = TOP + (to % DEVICES) * CELL + at
            picture.arrow(x + CELL + GAP / 2, again - shift * 34, end, again)


def _caption(picture: Drawing, *lines: str) -> None:
    for number, line in enumerate(lines):
        picture.note(20, TOP + DEVICES * CELL + 14 + 20 * number, line)


DRAWN = {"gather": gather, "scatter": scatter, "both-ways": both_ways, "timeline": timeline}


def main() -> None:
    """Write every picture."""
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
