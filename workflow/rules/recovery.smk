# What a killed run, or a hand that deleted a file, left behind: seen when a run starts, so that running again is all it takes.
#
# needs: the manifests that name files beside them
# makes: nothing; frees a lock that no living run holds, and has manifests made again whose files are gone

import fcntl

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
for manifest in [*FETCHED, *WEIGHTS, *ASSEMBLIES, *ENGINES]:
    if os.path.exists(manifest) and (lost := lost_files(manifest)):
        logger.info(f"{lost[0]} is gone or not whole: {manifest} is made again")
        os.remove(manifest)
