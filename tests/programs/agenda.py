"""What a rank has put off: receives to be made and requests to be waited for, each after some step.

Shared by both interpreters. It decides when something happens on a rank, never what.
"""


class Agenda:
    """`add` what is to happen after a step; `due` returns it when that step is done."""

    def __init__(self):
        self.items = []

    def add(self, place, item):
        self.items.append((place, item))

    def due(self, place):
        """Return what is due after this step, the last one added first, so that requests are met in another order."""
        ready = [item for when, item in self.items if when <= place]
        self.items = [(when, item) for when, item in self.items if when > place]
        return ready[::-1]
