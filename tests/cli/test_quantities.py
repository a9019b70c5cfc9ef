"""Errors in words, tables and keys."""

from __future__ import annotations

from nvalchemi.cli.evaluate import in_milli, print_report
from nvalchemi.cli.train import in_words

METRICS = {
    "loss": 0.5, "energy_mae": 0.0031, "energy_rmse": 0.004, "energy_per_atom_mae": 0.0003444, "energy_per_atom_rmse": 0.0005,
    "forces_mae": 1.5, "forces_rmse": 2.0, "stress_mae": 0.001, "stress_rmse": 0.002, "n": 10,
}  # fmt: skip


def test_keys_say_the_unit():
    assert in_milli({"forces_mae": 0.012, "forces_rmse": 0.02, "n": 3}) == {
        "forces_mae_meV_per_A": 12.0,
        "forces_rmse_meV_per_A": 20.0,
    }
    assert list(in_milli(METRICS)) == [
        "energy_mae_meV", "energy_rmse_meV", "energy_per_atom_mae_meV", "energy_per_atom_rmse_meV",
        "forces_mae_meV_per_A", "forces_rmse_meV_per_A", "stress_mae_meV_per_A3", "stress_rmse_meV_per_A3",
    ]  # fmt: skip


def test_in_words():
    assert in_words(METRICS) == "energy MAE 3.1 meV (0.344 meV/atom), force MAE 1500 meV/Å, stress MAE 1 meV/Å³"
    assert in_words({"forces_mae": 0.01, "loss": 2.0}) == "force MAE 10 meV/Å"
    assert in_words({"loss": 2.0}) == "loss 2"


def test_the_table_has_units(capsys):
    print_report({**in_milli(METRICS), "n": 10, "store": "a.zarr", "weights": "ema", "step": 7})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["energy", "per", "atom", "0.344", "0.5", "meV/atom"] in lines
    assert ["stress", "component", "1", "2", "meV/Å³"] in lines
