"""The tests. This file is needed: some packages install a ``tests`` of their own, which would otherwise be found first."""
