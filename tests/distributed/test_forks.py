"""What is done beside gloo before a process is forked."""

from nvalchemi.distributed import forks


def test_a_moment_passes_before_a_loader_forks_its_workers(monkeypatch):
    """Beside gloo, whose threads may hold a lock of the interpreter that a forked process would wait for."""
    naps = []
    monkeypatch.setattr(forks.time, "sleep", naps.append)
    monkeypatch.setattr(forks, "_forked_at", -1.0)
    forks._before_fork()
    assert naps == []  # there is no group
    monkeypatch.setattr(forks.dist, "is_initialized", lambda: True)
    for _ in range(3):
        forks._before_fork()
    assert naps == [forks._REST]
    registered = []
    monkeypatch.setattr(forks, "_rests", False)
    monkeypatch.setattr(forks.os, "register_at_fork", lambda before: registered.append(before))
    for version in ((3, 12, 0), (3, 11, 9), (3, 11, 9)):
        monkeypatch.setattr(forks.sys, "version_info", version)
        forks.rest_before_forks()
    assert registered == [forks._before_fork]
