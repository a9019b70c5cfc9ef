"""Durability is tested with the store; here a few hundred tiny stores are written, and waiting for the disk is most of the time."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
