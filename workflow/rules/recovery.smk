# What a killed run, or a hand that deleted a file, left behind: seen when a run starts, so that running again is all it takes.
#
# needs: the results that are there, with their records; with `--config locked=true` the locks of all models
# makes: AGAIN, DATES, WANTED, and the input function `recovered`. Reading the workflow changes nothing: a result that cannot be trusted counts as one that is not
#        there, in a dry run as in a run, and the job that makes it takes its place. A run frees a lock that no living run holds.

import fcntl
import functools

from snakemake_interface_storage_plugins.io import Mtime

from lockstep.artifacts.files import read_json
from lockstep.provenance.again import not_as_locked, untrusted
from lockstep.provenance.dates import Dated, dates
from lockstep.provenance.explain import has_changed, report_has_changed
from lockstep.provenance.locked import check_project, find_lock
from lockstep.provenance.sources import Sources
from lockstep.report.summary import is_stale


def check_locks():
    """Refuse what will not be what the locks say, before any job; {manifest: why} of what is there and is not."""
    found = {}
    for model in CONFIG.models:
        lock_file = find_lock(model, [Path(), REPOSITORY])
        targets = [target for target in TARGETS if target.model == model]
        prompts = [prompt.text for prompt in CONFIG.models[model].golden.prompts]
        files = [*SIDE_FILES.get(model, []), *WEIGHT_FILES.get(model, [])]
        there = list(map(Path, files)) if model in FOLDERS else None
        made = all_steps(CONFIG, PLACE, targets)
        check_project(lock_file, targets, made, prompts, there)
        found |= not_as_locked(made, lock_file)
    return found


def config_has_changed():
    try:
        return read_json(PLACE.config()) != CONFIG.dump()
    except LockstepError:
        return True


def user_files(stage, model):
    """The files of the user that its rule names."""
    if stage in ("resolve", "architecture"):
        headers = stage == "resolve" or model in PACKED
        weights = WEIGHT_FILES.get(model, []) if headers else []
        return [*SIDE_FILES.get(model, []), *weights]
    if stage == "random_weights":
        return [str(SOURCES[model]), str(SOURCES[model].with_name("tokenizer.json"))]
    if stage == "adapters":
        folders = adapter_folders_here(model)
        return [str(path) for folder in folders for path in folder.glob("adapter_*")]
    return []


def dated_jobs():
    """All jobs with what tells whether they would make something else now, each after those that it reads from."""
    steps = STEPS if PLACE == RESULTS else all_steps(CONFIG, PLACE, TARGETS)
    config_job, *jobs, summary, plots = (
        JOBS if PLACE == RESULTS else all_jobs(CONFIG, PLACE, steps)
    )
    sources = {
        model: Sources.of(CONFIG, model, PLACE, SOURCES.get(model), ADAPTERS[model])
        for model in CONFIG.models
    }
    yield Dated(config_job, [], config_has_changed)
    for step, made in zip(steps, jobs):
        own = sources[step.names["model"]]
        yield Dated(
            made,
            user_files(step.stage, step.names["model"]),
            functools.partial(has_changed, step, own),
        )
    for rule, made in (("summary", summary), ("plots", plots)):
        yield Dated(made, [], functools.partial(report_has_changed, rule, made))


# With a record beside them: not speeds, and not what another manifest names.
RECORDED = [PREFIXED(made.outputs[0]) for made in JOBS]
# What is there, and is made again all the same. Jobs read the rules once more, and see for themselves what they are given.
AGAIN = {}
# When results count as made, of those whose dates say nothing of what they were made of.
DATES = {}
if workflow.is_main_process:
    with guard():
        AGAIN |= untrusted(
            RECORDED,
            {
                PREFIXED(path)
                for stage in (
                    "fetch",
                    "fetch_adapters",
                    "make_checkpoint",
                    "convert",
                    "export",
                    "build",
                )
                for path in made_by(stage)
            },
        )
        if LOCKED:
            AGAIN |= check_locks()
        if is_stale(PLACE):
            AGAIN[str(PLACE.summary())] = "it does not say what the checks say"
    for manifest, reason in AGAIN.items():
        logger.info(f"{reason}: {manifest} is made again")
    with guard():
        DATES |= dates(
            dated_jobs(),
            map(str, (REPOSITORY / "workflow" / "scripts").glob("*.py")),
            lambda path: path not in AGAIN and os.path.exists(path),
        )


# What a run is asked for.
WANTED = wanted(
    ASKED,
    lambda path: PREFIXED(path) not in AGAIN and os.path.exists(PREFIXED(path)),
)


def free_stale_lock(folder):
    """Delete Snakemake's lock files where no run is alive: `kill -9` leaves them, and the next run would refuse to start.

    Each run holds `alive` shared until its process ends, whichever way. Who can have it alone is the only one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alive = open(folder / "alive", "a")
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for stale in (folder / "locks").glob("*.lock"):
            stale.unlink()
    except BlockingIOError:
        pass  # another run is alive, and its lock is to be respected
    fcntl.flock(alive, fcntl.LOCK_SH)
    return alive


@functools.cache
def recover():
    """Once in a process, while Snakemake looks at what is there. Gives what is to be kept open."""
    # Snakemake's memory of which files exist, until the first job starts; storage plugins fill it in the same way. A folder that it has not looked through yet
    # it would look through later, and so find the manifest.
    known = workflow.iocache.exists_local
    for folder in {os.path.dirname(manifest) for manifest in AGAIN}:
        known.update({entry.path: True for entry in os.scandir(folder)})
        known.has_inventory.add(folder)
    known.update(dict.fromkeys(AGAIN, False))
    workflow.iocache.mtime.update(
        {path: Mtime(local=date) for path, date in DATES.items()}
    )
    # No executor: --summary, --report, --dag and their like.
    is_run = workflow.executor_plugin is not None and not workflow.dryrun
    try:
        return free_stale_lock(Path(".snakemake")) if is_run else None
    except OSError as error:
        # A read-only folder, or a file system without such locks.
        logger.debug(f"stale locks are not looked for: {error}")


def recovered(wildcards):
    """No inputs. An input function of the rules that stand at the beginning, of which any choice of jobs has one: called before Snakemake decides what to run."""
    if workflow.is_main_process:
        recover()
    return []
