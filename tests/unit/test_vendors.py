"""Which versions of each client are tested, and the table of what works with them."""

from __future__ import annotations

from support import vendors


def test_the_matrix_has_the_oldest_version_those_before_a_feature_the_last_minors_and_a_pre_release(monkeypatch):
    final = ["2.9.2", "2.10.0", "2.10.2", "2.17.1", "3.0.0", "3.1.0", "3.1.4", "3.2.0", "3.3.0", "3.3.1", "3.4.0"]
    index = {"mlflow": [*final, "3.5.0"], "mlflow-skinny": final}  # 3.5.0 cannot be installed yet
    newer = {name: [*published, "3.2.0rc1", "3.6.0rc1", "3.6.0rc2"] for name, published in index.items()}
    monkeypatch.setattr(vendors, "_of_index", lambda name, options: set((newer if options else index)[name]))
    monkeypatch.setitem(vendors.LATER, "mlflow", {"a feature": "2.11", "another": "2.18"})
    chosen = ["2.10.0", "2.10.2", "2.17.1", "3.1.4", "3.2.0", "3.3.1", "3.4.0", "3.6.0rc2"]
    assert vendors.versions_of("mlflow") == chosen


def test_the_table_has_one_row_for_each_version_that_is_tested(monkeypatch, tmp_path):
    monkeypatch.setattr(vendors, "TABLE", tmp_path / "versions.csv")
    rows = [("wandb", "0.9"), ("mlflow", "2.9.2"), ("mlflow", "2.17.1"), ("mlflow", "3.3.0")]
    vendors.TABLE.write_text("client,version,works,lost\n" + "".join(f"{c},{v},everything,nothing\n" for c, v in rows))
    vendors.write(vendors.Outcome("mlflow", "2.17.1", "everything else", "a, b"), ["2.9.2", "2.17.1"])
    assert vendors.TABLE.read_text().splitlines() == [
        "client,version,works,lost",
        *("wandb,0.9,everything,nothing", "mlflow,2.9.2,everything,nothing", 'mlflow,2.17.1,everything else,"a, b"'),
    ]
