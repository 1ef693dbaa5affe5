"""Hot rows on every rank: outputs, training, checkpoints by id, and what is refused."""

import os
import pickle
from dataclasses import replace

import hot_cold_training as training
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from shapes import replica, row
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

from shardcore.core.access_statistics import Zipf
from shardcore.core.errors import ShardCoreError
from shardcore.core.types import Plan, Setting, Table
from shardcore.cost.analytic import AnalyticModel
from shardcore.io.hot_ids import HotIds
from shardcore.search import SHARDERS, Budget
from shardcore.tables.hot_rows import with_hot_rows
from shardcore.torchrec.hot_cold import HotColdEmbeddingCollection
from shardcore.torchrec.modules import tables_of_model
from shardcore.torchrec.moves.checkpoints import load_rows, save_rows
from shardcore.torchrec.planner import problem_for
from shardcore.torchrec.sharding_plan import from_torchrec, to_torchrec

CONFIGS = [
    EmbeddingConfig(name="h", num_embeddings=50, embedding_dim=8, feature_names=["f", "g"]),
    EmbeddingConfig(name="k", num_embeddings=20, embedding_dim=8, feature_names=["q"]),
]
HOT = HotIds("h", 50, np.array([0, 3, 4, 17, 49]))


def test_outputs_are_those_of_whole_tables():
    whole, module = EmbeddingCollection(CONFIGS), HotColdEmbeddingCollection(CONFIGS, {"h": HOT})
    rows = whole.embeddings["h"].weight.data
    module.hot["h"].data.copy_(rows[HOT.ids])
    module.cold.embeddings["h_cold"].weight.data.copy_(rows[np.setdiff1d(np.arange(50), HOT.ids)])
    module.cold.embeddings["k"].weight.data.copy_(whole.embeddings["k"].weight.data)
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, (3, 6))
    ids = np.concatenate([rng.integers(0, n, m) for n, m in zip([50, 50, 20], lengths.sum(1), strict=True)])
    batch = KeyedJaggedTensor(
        keys=["f", "g", "q"], values=torch.from_numpy(ids), lengths=torch.from_numpy(lengths.ravel())
    )
    found, wanted = module(batch), whole(batch)
    for feature in ("f", "g", "q"):
        assert torch.equal(found[feature].values(), wanted[feature].values())
        assert torch.equal(found[feature].lengths(), wanted[feature].lengths())


@pytest.mark.parametrize(
    "hosts, per_host, optimizer",
    [(1, 2, "EXACT_SGD"), pytest.param(2, 2, "EXACT_ADAGRAD", marks=pytest.mark.long)],
)
def test_twenty_steps_end_as_unsharded_across_a_change_of_hot_ids_and_plan(hosts, per_host, optimizer):
    said = training.in_processes(hosts, per_host, training.train_and_move, optimizer)
    assert not any(said), said


def test_hot_rows_have_the_type_of_their_table():
    half = replace(CONFIGS[0], data_type=DataType.FP16)
    module = HotColdEmbeddingCollection([half], {"h": HOT})
    assert {p.dtype for p in module.parameters()} == {torch.float16}
    batch = KeyedJaggedTensor(keys=["f", "g"], values=torch.tensor([3, 5]), lengths=torch.tensor([1, 1]))
    whole = EmbeddingCollection([half])(batch)
    assert all(found.values().dtype == whole[f].values().dtype for f, found in module(batch).items())


def test_a_table_of_a_name_that_another_collection_has_too_goes_to_torchrec():
    def collections(hot):
        def plain(config):
            return EmbeddingCollection([config], device=torch.device("meta"))

        return torch.nn.ModuleDict(
            {
                "a": HotColdEmbeddingCollection(CONFIGS[:1], {"h": HOT}, "meta")
                if hot
                else plain(CONFIGS[0]),
                "b": plain(replace(CONFIGS[0], feature_names=["r"])),
            }
        )

    whole = problem_for(collections(False), training.problem(1, 2).topology, 16, dict.fromkeys("fgr", 2.0))
    given = with_hot_rows(whole, {"a.h": len(HOT.ids)})
    model = collections(True)
    assert (
        sorted(tables_of_model(model))
        == sorted(t.name for t in given.tables)
        == ["a.h_cold", "a.h_hot", "b.h"]
    )
    plan = SHARDERS["size_greedy"](given, AnalyticModel(Setting("cpu", 16)))
    assert {path: list(of) for path, of in to_torchrec(plan, given, model, "cpu").plan.items()} == {
        "a.cold": ["h_cold"],
        "b": ["h"],
    }


def test_a_job_never_trains_with_other_hot_ids_in_silence():
    said = {
        "save_over_other_rows": "has a checkpoint already",
        "other_ids_on_a_rank": "rank 1 has other hot ids of 'b' than rank 0",
        "no_hot_ids_on_a_rank": "rank 1 has other hot ids of",
        "another_checkpoint": "a checkpoint has other hot ids of table 'b'",
    }
    for words in training.in_processes(1, 2, training.refusals, tuple(said)):
        assert [a in b for a, b in zip(said.values(), words.splitlines(), strict=True)] == [True] * 4, words


@pytest.mark.parametrize(
    "hot, said",
    [
        ({"h": HotIds("h", 51, HOT.ids)}, "table 'h' of 50 rows was given the hot ids of 'h' of 51 rows"),
        ({"h": replace(HOT, table="k")}, "was given the hot ids of 'k'"),
        ({"absent": HOT}, "table 'absent', which is not among the tables"),
    ],
)
def test_hot_ids_of_another_table_are_refused(hot, said):
    with pytest.raises(ShardCoreError, match=said):
        HotColdEmbeddingCollection(CONFIGS, hot)


def test_a_feature_of_two_tables_is_refused():
    with pytest.raises(ShardCoreError, match="feature 'f' has tables 'h' and 'k'"):
        HotColdEmbeddingCollection([CONFIGS[0], replace(CONFIGS[1], feature_names=["f"])], {"h": HOT})


@pytest.mark.parametrize("wrong", [-1, 50])
def test_ids_outside_the_table_are_refused(wrong):
    module = HotColdEmbeddingCollection(CONFIGS[:1], {"h": HOT})
    batch = KeyedJaggedTensor(keys=["f", "g"], values=torch.tensor([3, wrong]), lengths=torch.tensor([1, 1]))
    with pytest.raises(ShardCoreError, match=f"table 'h' was given ids .*{wrong}.* it has 50 rows"):
        module(batch)


def test_a_plan_goes_to_torchrec_without_hot_rows_and_comes_back():
    given = with_hot_rows(training.problem(2, 2), {name: len(ids) for name, ids in training.HOT.items()})
    model = training.Model(training.HOT, "meta")
    assert sorted(tables_of_model(model)) == sorted(t.name for t in given.tables)
    plan = training.plan(given, cut=True)
    exported = to_torchrec(plan, given, model, "cpu")
    assert {path: sorted(of) for path, of in exported.plan.items()} == {"ec.cold": ["a_cold", "b_cold", "c"]}
    assert from_torchrec(exported, given, model) == replace(
        plan, placements=from_torchrec(exported, given, model).placements
    )
    assert {(p.shard.table.name, p.kind) for p in from_torchrec(exported, given, model).placements} == {
        (p.shard.table.name, p.kind) for p in plan.placements
    }


def test_each_of_several_collections_goes_under_its_own_path():
    """By the model, and by paths only; two collections have tables of one name."""

    def collections(hot):
        def one():
            ids = {"a": HotIds("a", 50, np.array([1, 2]))} if hot else {}
            configs = [replace(CONFIGS[0], name="a"), replace(CONFIGS[1], name="b")]
            return (
                HotColdEmbeddingCollection(configs, ids, "meta")
                if hot
                else EmbeddingCollection(configs, device=torch.device("meta"))
            )

        return torch.nn.ModuleDict({"user": one(), "item": torch.nn.ModuleDict({"cold": one()})})

    whole = problem_for(
        collections(hot=False), training.problem(1, 2).topology, 16, dict.fromkeys("fgq", 2.0)
    )
    given = with_hot_rows(whole, {"user.a": 2, "item.cold.a": 2})
    plan = SHARDERS["size_greedy"](given, AnalyticModel(Setting("cpu", 16)))
    exported = to_torchrec(plan, given, collections(hot=True), "cpu")
    assert {path: sorted(of) for path, of in exported.plan.items()} == {
        "user.cold": ["a_cold", "b"],
        "item.cold.cold": ["a_cold", "b"],
    }
    assert to_torchrec(plan, given, "item.cold", "cpu") == exported
    with pytest.raises(
        ShardCoreError,
        match="module is 'of.none'; all tables of problem 'model' name their "
        "collections, which are 'user', 'user.cold', 'item.cold'",
    ):
        to_torchrec(plan, given, "of.none", "cpu")


def test_tables_without_a_collection_go_under_the_path_that_is_given():
    tables = tuple(Table(name, 60, 16, 2.0, Zipf(1.1), sequence=True) for name in "ab")
    given = with_hot_rows(replace(training.problem(1, 2), tables=tables), {"a": 5})
    plan = SHARDERS["size_greedy"](given, AnalyticModel(Setting("cpu", 16)))
    exported = to_torchrec(plan, given, "model.ec", "cpu")
    assert {path: sorted(of) for path, of in exported.plan.items()} == {"model.ec.cold": ["a_cold", "b"]}


def test_a_plan_that_divides_hot_rows_is_refused():
    given = with_hot_rows(training.problem(1, 2), {name: len(ids) for name, ids in training.HOT.items()})
    free = replace(given, constraints=replace(given.constraints, kinds=()))
    placements = tuple(
        row(t, free.topology) if t.name != "b_hot" else replica(t, free.topology) for t in free.tables
    )
    with pytest.raises(ShardCoreError, match="places table 'a_hot' by row; its rows are hot"):
        to_torchrec(Plan(placements), free, training.Model(training.HOT, "meta"), "cpu")


def saved(folder, hot=HOT):
    module = HotColdEmbeddingCollection(CONFIGS, {"h": hot})
    save_rows(module, folder)
    return module


def test_rows_are_loaded_by_their_ids(tmp_path):
    old = saved(tmp_path / "rows")
    new = HotColdEmbeddingCollection(CONFIGS, {"k": HotIds("k", 20, np.array([2, 3]))})
    load_rows(new, tmp_path / "rows")
    assert torch.equal(new.cold.embeddings["h"].weight[HOT.ids], old.hot["h"])
    assert torch.equal(new.hot["k"], old.cold.embeddings["k"].weight[[2, 3]])


def test_rows_that_are_not_whole_are_refused(tmp_path):
    saved(tmp_path / "rows")
    with pytest.raises(ShardCoreError, match="has a checkpoint already"):
        saved(tmp_path / "rows")
    file = next((tmp_path / "rows").glob("*.distcp"))
    content = file.read_bytes()
    for damage, said in (
        (lambda: file.write_bytes(content[:-1]), "cut short"),
        (file.unlink, "No such file"),
    ):
        damage()
        with pytest.raises(ShardCoreError, match=said):
            load_rows(HotColdEmbeddingCollection(CONFIGS, {"h": HOT}), tmp_path / "rows")
    (tmp_path / "rows/.metadata").unlink()
    with pytest.raises(ShardCoreError, match="has 0 files of tensors and no .metadata"):
        load_rows(HotColdEmbeddingCollection(CONFIGS, {"h": HOT}), tmp_path / "rows")


def weights(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_a_flipped_bit_never_loads_as_other_weights(tmp_path):
    """At 40 places of each file. It may do no harm, as in padding."""
    own = weights(saved(tmp_path / "rows"))
    refused = 0
    for path in sorted((tmp_path / "rows").iterdir()):
        content = path.read_bytes()
        for i in range(40):
            damaged = bytearray(content)
            damaged[i * (len(content) - 1) // 39] ^= 1 << i % 8
            path.write_bytes(damaged)
            module = HotColdEmbeddingCollection(CONFIGS, {"h": HOT})
            try:
                load_rows(module, tmp_path / "rows")
            except ShardCoreError as error:
                assert all(line.isprintable() for line in str(error).splitlines())
                refused += 1
            else:
                assert all(torch.equal(v, own[k]) for k, v in weights(module).items())
        path.write_bytes(content)
    assert refused > 100


def as_state(module):
    """What DCP is given of a module."""
    return dict(module.state_dict())


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.update(hot_ids_h=t["hot_ids_h"].flip(0)), "rising"),
        (lambda t: t.update(hot_ids_h=t["hot_ids_h"][:-1]), "has 4 hot ids and 5 rows of 'hot.h'"),
        (lambda t: t.pop("hot_ids_h"), "has only some of"),
        (lambda t: t.update({"hot.h": t["hot.h"][:, :2]}), "table 'h' has 8 columns here"),
        (lambda t: t.update({"hot.h": t["hot.h"].long()}), "it needs numbers of rows or cells"),
        (lambda t: t.update({"hot.h": t["hot.h"][0, 0]}), "has 'hot.h' \\[\\]"),
        (lambda t: t.update({"ema.hot.h": t["hot.h"]}), "has 'ema.hot.h' and 'hot.h'; it needs one"),
        (lambda t: t.update({"s.hot.h.sum": t["hot.h"]}), "has state sum of table 'h', and no optimizer"),
    ],
)
def test_tables_of_another_form_are_refused(tmp_path, change, said):
    tensors = as_state(HotColdEmbeddingCollection(CONFIGS, {"h": HOT}))
    change(tensors)
    dcp.save(tensors, checkpoint_id=tmp_path / "rows")
    with pytest.raises(ShardCoreError, match=said):
        load_rows(HotColdEmbeddingCollection(CONFIGS, {"h": HOT}), tmp_path / "rows")


def test_metadata_that_would_run_code_is_refused(tmp_path):
    saved(tmp_path / "rows")
    (tmp_path / "rows/.metadata").write_bytes(pickle.dumps(os.getcwd))
    (tmp_path / "rows/.metadata.sha256").unlink()
    with pytest.raises(ShardCoreError, match="is no metadata of a checkpoint: .*it names posix.getcwd"):
        load_rows(HotColdEmbeddingCollection(CONFIGS, {"h": HOT}), tmp_path / "rows")


def test_rows_of_a_larger_table_are_missing(tmp_path):
    saved(tmp_path / "rows")
    larger = [replace(CONFIGS[0], num_embeddings=52), CONFIGS[1]]
    module = HotColdEmbeddingCollection(larger, {"h": replace(HOT, rows=52)})
    with pytest.raises(ShardCoreError, match="lacks weights of 2 rows of table '.*h', such as id 50"):
        load_rows(module, tmp_path / "rows")


def test_a_model_with_hot_rows_is_a_problem_and_is_planned():
    """It is that of the model without them, with the hottest rows in tables of their own."""
    hot = torch.nn.ModuleDict({"user": HotColdEmbeddingCollection(CONFIGS, {"h": HOT}, "meta")})
    plain = torch.nn.ModuleDict({"user": EmbeddingCollection(CONFIGS, device=torch.device("meta"))})
    topology, lookups = training.problem(1, 2).topology, dict.fromkeys("fgq", 2.0)
    given = problem_for(hot, topology, 16, lookups)
    assert given == with_hot_rows(problem_for(plain, topology, 16, lookups), {"h": len(HOT.ids)})
    plan = SHARDERS["anneal_columns"](given, AnalyticModel(Setting("cpu", 16)), budget=Budget(evals=200))
    assert set(to_torchrec(plan, given, hot, "cpu").plan) == {"user.cold"}
