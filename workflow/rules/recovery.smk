# What a killed run, or a hand that deleted a file, left behind: seen when a run starts, so that running again is all it takes.
#
# needs: the manifests that name files beside them; with `--config locked=true` the locks of all models
# makes: nothing; frees a lock that no living run holds, and has manifests made again whose files are gone or that are not the locked ones,
#        and takes the time of results back that are from the future

import contextlib
import fcntl
import time

from lockstep.lock.locked import check_project, find_lock, stale
from lockstep.lock.steps import steps
from lockstep.sidefiles import lost_files


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


try:
    alive_while_open = free_stale_lock(Path(".snakemake"))
except OSError as error:
    # A read-only folder, or a file system without such locks.
    logger.debug(f"stale locks are not looked for: {error}")

# Snakemake looks at manifests only. One whose files are gone or cut short is worth nothing, and without it they are made again.
# A manifest that is damaged itself stays: who reads it refuses it.
for manifest in [*FETCHED, *WEIGHTS, *ASSEMBLIES, *ENGINES]:
    lost = lost_files(manifest) if os.path.exists(manifest) else []
    if lost and lost[0] != Path(manifest):
        logger.info(f"{lost[0]} is gone or not whole: {manifest} is made again")
        os.remove(manifest)

# A clock that was set back: what was made from a file of the future would look older than it, and Snakemake would refuse it.
for path in map(Path, [*MANIFESTS, *REPORTS]):
    if path.is_file() and path.stat().st_mtime > time.time():
        # In a folder that cannot be written nothing is made, so nothing looks older.
        with contextlib.suppress(OSError):
            os.utime(path)


def check_locks():
    """Refuse what will not be what the locks say, before any job; have made again what is there and is not."""
    for model in CONFIG.models:
        lock_file = find_lock(model, [Path(), REPOSITORY])
        targets = [target for target in TARGETS if target.model == model]
        prompts = [prompt.text for prompt in CONFIG.models[model].golden.prompts]
        files = [*SIDE_FILES.get(model, []), *WEIGHT_FILES.get(model, [])]
        there = list(map(Path, files)) if model in FOLDERS else None
        check_project(lock_file, targets, prompts, there)
        made = [step for target in targets for step in steps(CONFIG, RESULTS, target)]
        for path, line in dict(stale(made, lock_file)).items():
            logger.info(f"{path} is not the locked one: {line}; it is made again")
            os.remove(path)


if LOCKED:
    with guard():
        check_locks()
