"""One stream of random numbers for each purpose, so that a draw more in one changes no other."""

import random


class Stream(random.Random):
    """Draws in the words of the simulation."""

    def chance(self, probability: float) -> bool:
        """Whether something of that probability happens."""
        return self.random() < probability

    def delay(self, usual: float, rare: float = 0.0, how_rare: float = 0.02) -> float:
        """Seconds around `usual`, and now and then up to `rare`."""
        if rare and self.chance(how_rare):
            return self.uniform(usual, rare)
        return usual * self.uniform(0.5, 1.5)


class Streams:
    """The streams of one seed, by name."""

    def __init__(self, seed: int) -> None:
        """Every stream follows from the seed and its name alone."""
        self._seed = seed
        self._known: dict[str, Stream] = {}

    def __getitem__(self, name: str) -> Stream:
        """The stream of that name."""
        if name not in self._known:
            self._known[name] = Stream(f"{self._seed}/{name}")
        return self._known[name]
