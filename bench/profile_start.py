"""Fine-tuning from a hardware profile against training from nothing, by the number of measured groups.

    python -m bench.profile_start datasets/cpu-amd-epyc --draws 3

Each draw takes groups of the train and validation splits at random. All arms train on the same ones, and are judged on
all groups of the test split. Errors are of forward + backward, in percent. `alone` has no measured group, `scaled` has
one factor: the median ratio of the drawn groups. `train` refuses fewer than 50 groups from nothing; here it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from bench import common
from bench.common import say
from shardcore import report
from shardcore.cost import accuracy, drift_correction, fit
from shardcore.cost.metrics import mape
from shardcore.cost.model import group_costs
from shardcore.cost.profile import Profile, load_profile
from shardcore.cost.profile_model import ProfileModel
from shardcore.io import dataset
from shardcore.io.measurements import ComputeSample

Arms = dict[str, float]


def total_ms(samples: Sequence[ComputeSample]) -> np.ndarray:
    return np.array([s.total_ms for s in samples])


def priced(profile: Profile, samples: Sequence[ComputeSample]) -> np.ndarray:
    """[S] ms of groups by a profile alone."""
    model = ProfileModel(profile, dataclasses.replace(samples[0].setting, hardware=profile.name))
    return np.array([group_costs([s.request.shards], model, s.request.batch)[0] for s in samples])


def errors(
    known: Sequence[ComputeSample], test: Sequence[ComputeSample], profiles: Sequence[Profile]
) -> Arms:
    """Errors of the arms, trained on known groups."""
    found, measured = {}, total_ms(test)
    for profile in profiles:
        alone = priced(profile, test)
        factor = np.exp(np.median(np.log(total_ms(known) / priced(profile, known))))
        found[f"{profile.name} alone"] = mape(alone, measured)
        found[f"{profile.name} scaled"] = mape(factor * alone, measured)
    for name, start in (("from nothing", None), *((f"from {p.name}", p) for p in profiles)):
        model = fit.train(known, [], known[0].setting, start=start).model
        found[name] = mape(accuracy.predict(model, test), measured)
    return found


def main() -> None:
    parser = common.parser(
        __doc__,
        {"measurements": "folder of a dataset"},
        profiles=(["cpu"], "profiles to start from"),
        groups=([25, 50, 100, 200], "numbers of measured groups"),
        draws=(3, "of groups, for each number"),
    )
    args = parser.parse_args()
    fit.MIN_COMPUTE = fit.MIN_STARTED
    [setting] = dataset.settings(args.measurements)
    groups = [s for s in drift_correction.read(args.measurements, setting).compute if s.error is None]
    groups.sort(key=lambda s: s.id)
    test, rest = accuracy.held_out(groups), [s for s in groups if dataset.split_of(s.id) != "test"]
    profiles = [load_profile(name) for name in args.profiles]
    rows: dict[int, list[Arms]] = {}
    for draw in range(args.draws):
        for n in args.groups:
            chosen = np.random.default_rng(draw).choice(len(rest), n, replace=False)
            rows.setdefault(n, []).append(errors([rest[i] for i in chosen], test, profiles))
            say(draw, n, {name: round(error, 1) for name, error in rows[n][-1].items()})
    names = list(rows[args.groups[0]][0])
    table = [
        (name, *(f"{np.mean([arms[name] for arms in rows[n]]):.1f}" for n in args.groups)) for name in names
    ]
    print(f"{setting}; {len(test)} groups of the test split, mean of {args.draws} draws, error in percent\n")
    print(report.markdown_table(("groups", *map(str, args.groups)), table))


if __name__ == "__main__":
    main()
