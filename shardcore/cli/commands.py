"""All commands with their options, which are declared here and nowhere else.

The command line is made of COMMANDS, and each command's options of the fields of its class (see options.py). What a
command does is a function of these options in a module beside this one, which is imported when the command runs. So
help is quick, and needs no package of an extra.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from shardcore.cli.options import (
    Amount,
    Argument,
    DatasetFolder,
    Device,
    Duration,
    Flat,
    Gib,
    ModelOptions,
    Natural,
    Needs,
    Optimizer,
    Output,
    PlanFile,
    Positive,
    PositiveFloat,
    PositiveGib,
    Precision,
    ProblemFile,
    SearchOptions,
)
from shardcore.core.job import Job
from shardcore.core.validation import MOST_DEVICES, number_within
from shardcore.io.model_files import MODEL_JSON, MODEL_WEIGHTS
from shardcore.measure.config import KernelConfig, PairConfig, ReplayConfig
from shardcore.measure.sampling.groups import GroupConfig
from shardcore.stages.measure_config import MeasureConfig, Samples

ProfileFile = Annotated[Path, "PROFILE.json"]
JobFolder = Annotated[Path, "FOLDER"]
PlansFolder = Annotated[str, "PLANS"]


# --- plan, price, export ------------------------------------------------------------------------------------


_WITH_OFFERS = Needs(("offers",), "of which a cluster is chosen")
_WITH_START = Needs(("start",), "the plan to start from")
_TARGET = ("step_ms", "samples_per_s", "price_per_hour", "each")


@dataclass(frozen=True, kw_only=True)
class _PricingOptions(ModelOptions):
    """Options of a command that prices ops with a confidence.

    confidence: take as an op's cost the time that its measurement stays below with this probability, such as
      0.9, instead of the expected time
    """

    confidence: Annotated[PositiveFloat, "P"] | None = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SearchOptions, _PricingOptions):
    """Search a plan for a problem under a cost model. Options for decisions before the search can be combined;
    each decision has several problems searched.

    offers: types of machines, with their models or profiles: choose the cluster, too (docs/plan_provision.md); with a
      target and --out-problem
    step_ms: longest step that is fast enough; the cheapest cluster is chosen
    samples_per_s: fewest samples a second that are fast enough; the cheapest cluster is chosen
    price_per_hour: highest price of the cluster; the fastest is chosen
    each: in place of a target, plan for every offer, with all its hosts: tables are cut in one way, so that a
      checkpoint loads on all; the same on all are the columns of tables, or also which are replicas, or their kinds;
      default: columns; --out is a folder, with a problem and a plan for each offer
    clusters: write clusters.json, all clusters that were searched, and curve.png (with matplotlib)
      into this folder, even if no cluster meets the target
    algorithm: portfolio, the default (the cheapest plan of several searches), anneal, anneal_columns (tables
      whole or cut by columns only), random, size_greedy, dim_greedy, lookup_greedy, size_lookup_greedy,
      neuroshard or torchrec (where installed); with --policy: dreamshard, dreamshard_direct or autoshard
      (tables whole), or these with _columns (also cut by columns)
    policy: folder of a trained policy (train-policy), for a learned algorithm; the default algorithm is then
      the policy's
    start: improve this plan of the problem instead of making a new one (by annealing); with --groups, also a
      plan of groups
    start_problem: problem that --start was made for, if it has changed since: other tables, shapes,
      statistics or devices
    without: devices of its problem that are gone; default: those with the highest numbers, if
      there are fewer now
    max_moved_tables: most tables that may move; default: any number
    max_moved_gib: most GiB of weights that may move, in addition to those that have to;
      default: any number
    max_pause: longest pause of a job while its tables move, such as 30s
    moves_pay_back_in: longest time until the gain makes up for that pause, such as 10min; fewer
      tables move, or none, if more would take longer
    move_rates: measured rates of moving tables on the job's machines (`job rates`); default:
      only bytes on links count
    groups: divide the devices into groups of SIZE, or of the best size, that replicate one plan (TorchRec's
      DMPCollection)
    sync_every: steps from one synchronisation of the replicas to the next; default: 1
    hot_rows: have the hottest rows of sequence tables on every device, as separate tables; with --out-problem
    towers: file of tables that belong together on a host, and of the ratio by which a tower module compresses
      what crosses hosts (docs/plan_towers.md)
    tiers: decide which rows are in host memory, if not all fit in that of devices; with --out-problem
    host_gib: memory of each host that tables may take; default: that of the problem
    link_gbps: GB/s between a device and its host's memory, which is not measured; default: that
      of the problem, or 25
    out_problem: write the problem of the plan, if decisions change it
    survive: also plan for the loss of each rank or host
    prepared: write these plans to this folder, from which a restarted job takes one (ShardCorePlanner(prepared=DIR))
    explain: show what bounds the plan, what other algorithms find, and what more memory or more devices would
      bring; each is searched with the same budget again
    """

    REQUIRED = (("model", "hardware", "offers"),)
    EXCLUSIVE = (*SearchOptions.EXCLUSIVE, _TARGET)
    problem: Argument[ProblemFile]
    offers: Annotated[Path, "OFFERS.json"] | None = None
    step_ms: Annotated[PositiveFloat, _WITH_OFFERS] | None = None
    samples_per_s: Annotated[PositiveFloat, _WITH_OFFERS] | None = None
    price_per_hour: Annotated[PositiveFloat, _WITH_OFFERS] | None = None
    each: Annotated[Literal["columns", "replicas", "kinds"], _WITH_OFFERS] | None = field(
        default=None, metadata={"nargs": "?", "const": "columns"}
    )
    clusters: Annotated[DatasetFolder, Output(("clusters.json", "curve.png")), _WITH_OFFERS] | None = None
    algorithm: str | None = None
    policy: Annotated[Path, "POLICY"] | None = None
    start: Annotated[Path, "PLAN"] | None = None
    start_problem: Annotated[ProblemFile, _WITH_START] | None = None
    without: Annotated[list[Annotated[Natural, "DEVICE"]] | None, _WITH_START] = field(
        default=None, metadata={"nargs": "+", "action": "extend"}
    )
    max_moved_tables: Annotated[Natural, "N", _WITH_START] | None = None
    max_moved_gib: Annotated[Gib, "G", _WITH_START] | None = None
    max_pause: Annotated[Duration, _WITH_START] | None = None
    moves_pay_back_in: Annotated[Duration, _WITH_START] | None = None
    move_rates: Annotated[Path, "RATES.json", _WITH_START] | None = None
    groups: Annotated[str, "auto|SIZE"] | None = field(default=None, metadata={"nargs": "?", "const": "auto"})
    sync_every: Annotated[Positive, "N", Needs(("groups",), "whose replicas it is for")] | None = None
    hot_rows: bool = False
    towers: Annotated[Path, "TOWERS.json"] | None = None
    tiers: bool = False
    host_gib: Annotated[PositiveGib, Needs(("tiers",), "of which it is the memory")] | None = None
    link_gbps: Annotated[PositiveFloat, Needs(("tiers",), "whose link it is")] | None = None
    out_problem: Annotated[ProblemFile, Output()] | None = None
    explain: bool = False
    survive: Annotated[Literal["rank", "host"], Needs(("prepared",), "where its plans go")] | None = None
    prepared: Annotated[DatasetFolder, Output(()), Needs(("survive",), "whose plans it has")] | None = None
    out: Annotated[PlanFile, Output()] | None


@dataclass(frozen=True, kw_only=True)
class PriceOptions(_PricingOptions):
    """Predict the cost of one training step of a plan, per device.

    explain: also show what bounds the plan, what other algorithms find, and what more memory or more devices
      would bring
    json: show all numbers as JSON instead of a table
    out: write the JSON there
    """

    # Without either, a plan is priced by the profile that it was made with.
    REQUIRED = ()
    EXCLUSIVE = (*ModelOptions.REQUIRED, ("explain", "json"))
    plan: Argument[PlanFile]
    problem: ProblemFile
    explain: bool = False
    json: bool = False
    out: Annotated[Path, "COST.json", Output()] | None = None


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a plan for TorchRec. shardcore.torchrec.plan_files.read_torchrec reads it for DistributedModelParallel;
    shardcore.torchrec.dmp_collection.read_dmp_collection reads a plan of groups for DMPCollection.

    module: path in the model of the collection of those tables that name none; default: the path in TorchRec's
      DLRM, sparse_arch.embedding_bag_collection
    compute_device: default: cpu for a plan on CPUs, else cuda
    """

    plan: Argument[PlanFile]
    problem: ProblemFile
    module: Annotated[str, "PATH"] | None = None
    compute_device: Device | None = None
    out: Annotated[Path, "TORCHREC.json", Output()]


# --- replay -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Run one training step of plans for real on this machine, in alternation, and time its parts per device.

    plans: plans of one problem
    model: show what this trained model predicts, too; if weights of tables differ in precision, give it for
      each
    device: default: cuda if there is a GPU, else cpu
    hardware: name of the device in the setting; default: its product name
    arena_gib: memory for weights in each process, and so the largest shard
    append: keep the replays in this dataset, too, so that training learns the times of exchanges in steps;
      replays that it has are not run again
    out: write all figures there
    """

    plans: Argument[list[PlanFile]]
    problem: ProblemFile
    model: list[Annotated[Path, "MODEL"]] | None = None
    device: Device | None = None
    hardware: str | None = None
    config: Annotated[ReplayConfig, Flat(("repeats", "timeout_s", "seed"))] = ReplayConfig()
    arena_gib: PositiveGib = 1.0
    append: Annotated[DatasetFolder, Output(())] | None = None
    out: Annotated[Path, "REPLAY.json", Output()] | None = None


# --- problem, heat, hot-drift -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """Make a problem file from a public list of tables, a traced job, or by drawing from a pool.

    tables: name of a public list (mlperf-dlrm-dcnv2, mlperf-dlrmv3, ...), the folder of a job that
      ShardCoreProfiler traced (docs/job.md) or a POOL.json
    devices: number of devices
    hosts: number of hosts, each with equally many devices
    pods: number of pods, each with equally many hosts, as in NVLink domains; give links within and between
      them in the file
    hardware: profile of the devices, by name or file (`profile list`), which has their memory and links
    memory_gib: memory of a device, of which 15% is kept for the dense part, unless drawn from a pool;
      default: the profile's, or 74.5 (the 80 GB of an H100's data sheet)
    batch: global batch
    optimizer: optimizer of the embeddings; default: the one of the public list's reference, or exact_sgd
    precision: precision of the weights; default: as reported, or fp32
    zipf_alpha: exponent of the power law of a public list's lookups; 0: even; default: the list's own
    draw: number of the problem to draw from a pool
    max_dim: largest dim of drawn tables
    """

    tables: Argument[str]
    devices: Annotated[int, number_within(1, MOST_DEVICES)] = 4
    hosts: Positive = 1
    pods: Positive = 1
    hardware: Annotated[str, "PROFILE"] | None = None
    memory_gib: PositiveGib | None = None
    batch: Positive = 2048
    optimizer: Optimizer | None = None
    precision: Precision | None = None
    zipf_alpha: Annotated[float, "ALPHA"] | None = None
    draw: Annotated[Natural, "INDEX"] | None = None
    max_dim: Positive = 128
    seed: Natural = 0
    job: Annotated[
        Job,
        Flat(
            (
                "pipeline",
                "replica_optimizer",
                "dense_forward_ms",
                "dense_backward_ms",
                "dense_mflops",
                "forward_payload",
                "backward_payload",
            )
        ),
    ] = Job()
    out: Annotated[ProblemFile, Output()]


@dataclass(frozen=True, kw_only=True)
class HeatOptions:
    """Show which rows of a problem's tables are hot, and what a cache of them would miss.

    held: share of each table's rows that the cache holds
    """

    problem: Argument[ProblemFile]
    held: Annotated[float, "SHARE"] = 0.1


@dataclass(frozen=True, kw_only=True)
class HotDriftOptions:
    """Show how hot the hot rows of a job still are, and what other hot ids would save and move.

    problem: problem that `plan --hot-rows` wrote
    hot_ids: hot ids of the job (write_hot_ids)
    row_counts: lookups of each row in present samples (write_row_counts)
    out: write the present hot ids there
    """

    problem: Argument[Annotated[Path, "HOT.json"]]
    hot_ids: Annotated[Path, "IDS.safetensors"]
    row_counts: Annotated[Path, "COUNTS.safetensors"]
    out: Annotated[Path, "NEW.safetensors", Output()] | None = None


# --- measure, train, report ---------------------------------------------------------------------------------


_MEASURED = MeasureConfig(compute_samples=None, minutes=10.0, chunk=64, ranks=2, actors=1)


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Measure fused embedding ops on this machine's device; a rerun goes on where the last one ended.

    device: auto: cuda if there is a GPU, else cpu
    samples: stop after the first N different draws; 0: measure no ops; default: when the time is up
    out: dataset folder; it only grows
    pool: tables to draw from; default: the calibrated pool
    batch: global batch; default: 2048 on cpu, 65536 on cuda
    precision: precision of the weights
    hardware: name of the device in the setting; default: its product name
    arena_gib: memory for weights, and so the largest shard that is measured; default: 1 on cpu; on cuda,
      weights and optimizer state take half of the free memory
    exchanges: afterwards measure the first N exchanges among --ranks of this machine, into the same dataset
    steps: afterwards replay a step of each of the first N plans among --ranks, for the times of exchanges in
      steps
    dry_run: show what is missing, and about how long it takes, at the rate at which the dataset grew or
      the usual one of two CPU cores; measure and write nothing
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    samples: Samples | None = None
    out: Annotated[DatasetFolder, Output(())]
    pool: Annotated[Path, "POOL.json"] | None = None
    batch: Positive | None = None
    precision: Precision = "fp32"
    optimizer: Optimizer = "exact_sgd"
    hardware: str | None = None
    arena_gib: PositiveGib | None = None
    config: Annotated[
        MeasureConfig, Flat(("minutes", "again", "seed", "chunk", "hang_s", "ranks", "held_out"))
    ] = _MEASURED
    groups: Annotated[GroupConfig, Flat(("max_shards", "max_width", "sequences"))] = GroupConfig()
    kernels: Annotated[KernelConfig, Flat(("tolerance", "max_repeats", "interleave"))] = KernelConfig()
    exchanges: Samples = 0
    steps: Samples = 0
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train cost models on the samples of one setting in a dataset folder.

    datasets: this machine's folder, then those of other machines or sessions, whose samples give their shape
    hardware: hardware of the setting, if the folder has several settings
    batch: global batch of the setting, if the folder has several
    precision: precision of the setting, if the folder has several
    optimizer: optimizer of the setting, if the folder has several
    start: if samples are few, fine-tune this model of another batch, optimizer or machine, or a hardware
      profile, by name or file
    out: folder to write
    """

    datasets: Argument[list[DatasetFolder]]
    hardware: str | None = None
    batch: Positive | None = None
    precision: Precision | None = None
    optimizer: Optimizer | None = None
    start: Annotated[str, "MODEL|PROFILE"] | None = None
    seed: Natural = 0
    out: Annotated[Path, "MODEL", Output((MODEL_JSON, MODEL_WEIGHTS))]


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Show what a dataset covers, how noisy its timings are, and how far they drift and agree.

    out: write the plots there
    """

    dataset: Argument[DatasetFolder]
    out: Annotated[Path, "FOLDER", Output(())] | None = None


# --- train-policy -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainPolicyOptions:
    """Train a policy that places tables (DreamShard, AutoShard) against a cost model, on problems drawn from
    a pool, without any device. `plan --policy` uses it.

    name: dreamshard (as published, rewarded by a cost network of its own), dreamshard_direct (rewarded by the
      cost model) or autoshard (rewarded for even compute)
    model: folder of a trained cost model
    pool: tables to draw from, half of them kept for testing; default: the calibrated pool
    like: problem whose devices' speeds, hosts and links to take; default: --devices equal ones, without
      stated links
    min_tables: fewest tables of a problem
    max_tables: most tables of a problem
    max_dim: largest dim of a table
    problems: number of problems to learn from
    rounds: most rounds of training
    patience: rounds without a better plan before training stops
    out: folder to write
    """

    name: Argument[str]
    model: Path
    pool: Annotated[Path, "POOL.json"] | None = None
    like: ProblemFile | None = None
    devices: Positive = 4
    min_tables: Positive = 10
    max_tables: Positive = 60
    max_dim: Positive = 128
    problems: Positive = 60
    rounds: Positive = 30
    patience: Positive = 10
    seed: Natural = 0
    out: Annotated[Path, "POLICY", Output(("policy.json", MODEL_WEIGHTS))]


# --- profile ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the profiles of cards that come with ShardCore."""


@dataclass(frozen=True, kw_only=True)
class NetworksOptions:
    """List the networks that come with ShardCore: rates of links between hosts, by which collectives are priced.

    A problem's topology names one, or --hardware does (nvidia-h100-sxm@aws-efa-32x100g). Else the profile's own counts.
    """


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Make your own network: rates of links, fitted to what nccl-tests or rccl-tests print on it.

    name: name of the network
    from_: profile of the card that the logs are of; with @NETWORK, the network to start from
    from_nccl_tests: logs of all_reduce_perf, alltoall_perf and so on, as they print them; those of other cards are
      left out
    network_gbps: links of a device between hosts by the data sheet, each way
    """

    name: Argument[str]
    from_: Annotated[str, "PROFILE"]
    from_nccl_tests: list[Annotated[Path, "LOG"]] = field(metadata={"nargs": "+", "action": "extend"})
    network_gbps: PositiveFloat | None = None
    out: Annotated[Path, "NETWORK.json", Output()]


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Show the rates of a profile, with the uncertainty and the source of each.

    profile: name or file of the profile
    """

    profile: Argument[Annotated[str, "PROFILE"]]


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Make a profile of another card from its data sheet. Rates scale with what is given, and are less certain.

    name: name of the hardware, such as nvidia-h100-nvl
    from_: profile of the most similar card
    memory_gib: memory of a device
    hbm_gbps: bandwidth of that memory
    sm_ghz: number of multiprocessors times their clock in GHz
    l2_mib: L2 cache
    nvlink_gbps: links of a device within a host, each way
    network_gbps: links of a device between hosts, each way
    pcie_gbps: link of a device to host memory, each way
    peak_tflops: matrix units, numbers of 16 bits without sparsity
    device_name: part of torch.cuda.get_device_name() by which this card is recognised
    """

    name: Argument[str]
    from_: Annotated[str, "PROFILE"]
    memory_gib: PositiveGib | None = None
    hbm_gbps: PositiveFloat | None = None
    sm_ghz: PositiveFloat | None = None
    l2_mib: PositiveFloat | None = None
    nvlink_gbps: PositiveFloat | None = None
    network_gbps: PositiveFloat | None = None
    pcie_gbps: PositiveFloat | None = None
    peak_tflops: PositiveFloat | None = None
    device_name: list[Annotated[str, "TEXT"]] | None = None
    out: Annotated[ProfileFile, Output()]


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Fit the rates of a profile to timings. Rates that no timing depends on stay as they are.

    timings: folder of a dataset, whose test split is kept to judge the fit; or CSV with a line for each
      timing, with the columns of docs/models.md; those of other cards are left out
    from_: profile to start from
    """

    timings: Argument[Annotated[Path, "DATASET|TIMINGS.csv"]]
    from_: Annotated[str, "PROFILE"]
    out: Annotated[ProfileFile, Output()]


# --- topology -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MeasurePairsOptions:
    """Time messages between all pairs of ranks, find which ranks share a host, a switch or a fast link, and
    write the problem with the hosts and bandwidths that were found.

    Under torchrun, or wherever RANK, WORLD_SIZE and MASTER_ADDR are set, run it once for each rank of the
    job. Rank 0 writes. Elsewhere it starts a process for each device of the problem on this machine.

    problem: problem whose device i is that of rank i
    device: gloo between CPUs, or NCCL between GPUs (not exercised yet)
    out: write the problem there, with hosts and bandwidths; its devices are in the new order of ranks
    ranks: write the order of ranks, their groups and the times of pairs there
    """

    problem: Argument[ProblemFile]
    device: Device = "cpu"
    pairs: Annotated[PairConfig, Flat(("message_kib", "repeats"))] = PairConfig()
    out: Annotated[ProblemFile, Output()]
    ranks: Annotated[Path, "RANKS.json", Output()] | None = None


# --- published plans ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HistoryOptions:
    """Show which versions of a problem's published plan were current, since when and why.

    plans: folder or URL of published plans
    name: name of the problem
    last: number of decisions to show
    """

    plans: Argument[PlansFolder]
    name: Argument[str]
    last: Annotated[Positive, "N"] = 20


@dataclass(frozen=True, kw_only=True)
class DiffOptions(ModelOptions):
    """Show which tables move from one plan to another, and how many bytes of weights.

    problem: problem of both plans; default: problem.json beside each, as in the folders of published versions
    page: write a page that compares them device by device and table by table, for a browser; with a model
      or a profile, which prices both
    """

    REQUIRED = ()
    EXCLUSIVE = ModelOptions.REQUIRED
    old: Argument[Annotated[Path, "OLD.json"]]
    new: Argument[Annotated[Path, "NEW.json"]]
    problem: ProblemFile | None = None
    page: Annotated[Path, "PAGE.html", Output()] | None = None


@dataclass(frozen=True, kw_only=True)
class ViewOptions(ModelOptions):
    """Show a plan's page in a browser: its devices, its tables, and what moves would do.

    A published version has a page beside it, which is shown where neither a model nor a profile is given. For a plan
    by a profile that ships with ShardCore, it is the default.

    problem: problem of the plan; default: problem.json beside it
    out: write the page there; default: a temporary file
    """

    REQUIRED = ()
    EXCLUSIVE = ModelOptions.REQUIRED
    plan: Argument[PlanFile]
    problem: ProblemFile | None = None
    out: Annotated[Path, "PAGE.html", Output()] | None = None


@dataclass(frozen=True, kw_only=True)
class DriftOptions(ModelOptions, SearchOptions):
    """Show how far a published plan is from the best, now that its tables' statistics have changed, and what a
    re-plan would save.

    plans: folder or URL of published plans
    name: name of the problem
    fresh: problem or pool of tables with the present shapes, pooling and access statistics
    max_moved_tables: most tables that the re-plan may move; default: any number
    threshold: share of the cost that the gain of a re-plan has to exceed, in addition to its margin, to pay
    out: write the re-plan there, with the present problem
    """

    plans: Argument[PlansFolder]
    name: Argument[str]
    fresh: Annotated[Path, "FILE.json"]
    max_moved_tables: Annotated[Natural, "N"] | None = None
    threshold: Amount = 0.0
    out: Annotated[Path, "FOLDER", Output(("problem.json", "plan.json"))] | None = None


# --- job ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class JobOptions(ModelOptions):
    """Options of a command that compares a job with a model, if one is given.

    problem: problem of the job, if its traces are not by ShardCoreProfiler
    plan: plan in use, if its traces are not by ShardCoreProfiler
    """

    REQUIRED = ()
    EXCLUSIVE: ClassVar[tuple[tuple[str, ...], ...]] = (*ModelOptions.REQUIRED, *SearchOptions.EXCLUSIVE)
    problem: ProblemFile | None = None
    plan: PlanFile | None = None


_WITH_MODEL = Needs(("model", "hardware"), "the model to correct")


@dataclass(frozen=True, kw_only=True)
class ReadOptions(JobOptions, SearchOptions):
    """Show where a job's newest traced step spends its time, and compare it with a model.

    folder: folder of ShardCoreProfiler, or any folder of torch.profiler's traces, one a rank
    propose: search a better plan under the corrected model, and show its gain
    out: write the model there, corrected by the traces
    out_profile: write the profile there, corrected by the traces
    out_plan: write the proposed plan there
    out_problem: write its problem there, with the lookups and the dense part of the job
    append: add the traced step to this dataset, so that training combines jobs and measurements
    """

    folder: Argument[JobFolder]
    propose: Annotated[bool, _WITH_MODEL] = False
    out: Annotated[Path, "MODEL", Output((MODEL_JSON, MODEL_WEIGHTS)), _WITH_MODEL] | None = None
    out_profile: Annotated[Path, "PROFILE.json", Output(), _WITH_MODEL] | None = None
    out_plan: (
        Annotated[Path, "PLAN.json", Output(), Needs(("propose",), "which searches the plan")] | None
    ) = None
    out_problem: Annotated[Path, "PROBLEM.json", Output(), _WITH_MODEL] | None = None
    append: Annotated[DatasetFolder, Output(()), _WITH_MODEL] | None = None


@dataclass(frozen=True, kw_only=True)
class WatchOptions(JobOptions):
    """Show where each traced step spends its time, as a job writes it.

    folder: folder of ShardCoreProfiler
    seconds: seconds between two looks at the folder
    steps: end after so many traced steps; 0: never
    """

    folder: Argument[JobFolder]
    seconds: PositiveFloat = 10.0
    steps: Natural = 0


IN_THE_JOB = """\
In the training job, on all ranks:

    from shardcore.plans.followed import StoredPlans
    from shardcore.torchrec.moves.follow import PlanFollower

    follower = PlanFollower(model, StoredPlans("PLANS", "NAME", job="trainer"), optimizer)
    for batch in batches:
        train(batch)
        follower.step()

Rank 0 reads the store now and then, and reports there. All ranks move between the same two steps. Then they measure
as many steps as before, and move back if these are slower than before and than predicted."""


@dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """Show which plans the jobs of a problem run, what they measured after each move, and what they do next.

    plans: folder or URL of published plans
    name: name of the problem
    seconds: seconds between two looks at the plans
    once: show what is known, then end
    """

    EXAMPLE: ClassVar[str] = IN_THE_JOB
    plans: Argument[PlansFolder]
    name: Argument[str]
    seconds: PositiveFloat = 10.0
    once: bool = False


@dataclass(frozen=True, kw_only=True)
class RatesOptions:
    """Measure how fast tables move between the ranks of a job, by moving tables made for it. Start it with torchrun,
    on the machines of the job, while they do nothing else.

    mib: weights of a table on each rank, in MiB; it takes four times as much memory
    repeats: repeats of each move, of which the median counts
    device: gloo between CPUs, or NCCL between GPUs (not exercised yet)
    out: write the rates there, by rank 0
    """

    EXAMPLE: ClassVar[str] = (
        "For a host of 8 ranks:\n\n    torchrun --nproc-per-node 8 -m shardcore job rates --out RATES.json"
    )
    mib: Positive = 32
    repeats: Positive = 3
    device: Device = "cpu"
    out: Annotated[Path, "RATES.json", Output()]


# --- all commands, in the order of the help -----------------------------------------------------------------

GROUPS = {
    "profile": "Rates of hardware from published measurements.",
    "topology": "Find how ranks are joined.",
    "job": "Read a running TorchRec job's traces: where its steps spend their time, why, and what a better plan would "
    "bring. Follow its moves between plans.",
}
"""Summary of each group of commands."""
COMMANDS: Mapping[str, tuple[str, type]] = {
    "plan": ("plans", PlanOptions),
    "price": ("plans", PriceOptions),
    "export": ("plans", ExportOptions),
    "replay": ("replays", ReplayOptions),
    "problem": ("problems", ProblemOptions),
    "heat": ("problems", HeatOptions),
    "hot-drift": ("problems", HotDriftOptions),
    "measure": ("measure", MeasureOptions),
    "train": ("train", TrainOptions),
    "report": ("measurements", ReportOptions),
    "train-policy": ("train", TrainPolicyOptions),
    "profile list": ("profiles", ListOptions),
    "profile show": ("profiles", ShowOptions),
    "profile networks": ("profiles", NetworksOptions),
    "profile network": ("profiles", NetworkOptions),
    "profile new": ("profiles", NewOptions),
    "profile fit": ("profiles", FitOptions),
    "topology measure": ("topologies", MeasurePairsOptions),
    "history": ("published", HistoryOptions),
    "diff": ("published", DiffOptions),
    "drift": ("published", DriftOptions),
    "view": ("published", ViewOptions),
    "job read": ("job", ReadOptions),
    "job watch": ("job", WatchOptions),
    "job follow": ("job", FollowOptions),
    "job rates": ("job", RatesOptions),
}
"""Module and options of each command. `job read` is the function `job_read` of the module `job`."""
