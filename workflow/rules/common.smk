# Shared by all rules: the plan, which the package makes of the config, and functions for their inputs and parameters.

import gc
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

# The objects of a plan stay until the run ends: to look for garbage among those of a thousand targets takes a seventh of
# the time of planning.
gc.set_threshold(200_000)


class Python(str):
    """Snakemake starts a script by "{python} {script:q}": the path of a .venv may have spaces, too."""

    def __format__(self, spec):
        return shlex.quote(self)


# The Python that has the package and what it needs: of the plan, and of jobs that no environment of Snakemake is for.
sys.executable = Python(os.environ.get("LOCKSTEP_PYTHON", sys.executable))
# This checkout's package, installed or not: the one whose code the rules' keys are of. Jobs inherit it.
SOURCES = Path(workflow.current_basedir.get_path_or_uri(secret_free=True)).parents[1] / "src"
if SOURCES.is_dir() and str(SOURCES) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")])))

# The results folder. In a workflow that has this one as a module, it opens with the module's `prefix`.
RESULTS = os.path.dirname(rules.config.output[0])


def ask_package(command, question):
    """Ask the package in another process, whose Python may be another one: Snakemake's needs none of its packages."""
    arguments = [str(sys.executable), "-P", "-m", "lockstep.workflow", command]
    try:
        process = subprocess.run(arguments, input=json.dumps(question, default=str), capture_output=True, text=True)
    except OSError as error:
        raise WorkflowError(f"{sys.executable}: {error.strerror}; {INSTALL}")
    # 3: a package that lockstep needs is not installed (lockstep.workflow.__main__).
    if process.returncode == 3 or "No module named lockstep" in process.stderr:
        raise WorkflowError(f"{process.stderr.strip().splitlines()[-1]}; {INSTALL}")
    sys.stderr.write(process.stderr)
    if process.returncode:
        sys.exit(process.returncode)
    return json.loads(process.stdout)


INSTALL = (
    "the plan of this workflow is made by the Python package lockstep-engines: pip install '.[workflow]' in a clone of this project, or "
    "set LOCKSTEP_PYTHON to a Python that has it; jobs can run in environments of their own by --sdm conda"
)
PLAN = {}
WHY_NO_PLAN = ""
try:
    PLAN = ask_package(
        "plan",
        {
            "version": "0.3.0",
            "config": config,
            "files": workflow.configfiles,
            "options": workflow.config_settings.config,
            "results": RESULTS,
            "starts": workflow.is_main_process,
            "has_environments": bool(workflow.deployment_settings.deployment_method),
        },
    )
except WorkflowError as error:  # rules can be listed and linted all the same
    WHY_NO_PLAN = str(error)


def plan():
    if WHY_NO_PLAN:
        raise WorkflowError(WHY_NO_PLAN)
    return PLAN


config.setdefault("cache", PLAN.get("cache", ""))
for line in PLAN.get("notes", []):
    logger.info(line)
for line in PLAN.get("warnings", []):
    logger.warning(line)

# With `--config device=NAME` a run makes only the targets of that device.
DEVICE = PLAN.get("device")
# The file name of a target's page.
CONSTRAINTS = PLAN.get("constraints", dict.fromkeys(["model", "precision", "layers", "backend"], "[^/]+"))
PAGE = "-".join(f"{{{name},{fits}}}" for name, fits in CONSTRAINTS.items()) + ".html"


wildcard_constraints:
    **CONSTRAINTS,


def of_config(name):
    """A parameter that a job takes from the config (src/lockstep/stages/params.py)."""

    def value(wildcards):
        names, values = plan()["params"][name]
        place = "/".join(wildcards[key] for key in names if key in wildcards.keys())
        if place not in values:
            raise WorkflowError(f"{name}: expected a target of the config, found {place}")
        return values[place]

    return value


def stage_of(name):
    """A parameter: the stage that a job runs, with digests of the code and of the pinned packages that it uses."""

    def value(wildcards):
        place = f"{name}/{wildcards.backend}" if "backend" in wildcards.keys() else name
        return {"name": name, **plan()["stages"][place]}

    return value


def files_of(kind):
    """Files of the user that belong to a model (src/lockstep/stages/files.py)."""
    return lambda wildcards: plan()["models"][wildcards.model][kind]


def of_kind(*kinds):
    """A regular expression of the models whose source is of one of these kinds; of none, one that fits nothing."""
    names = [name for name, model in PLAN.get("models", {}).items() if model["kind"] in kinds]
    return "|".join(sorted(names)) or "(?!)"


def is_quantized(wildcards):
    return re.fullmatch(r"w[0-9]+a[0-9]+(-fp8)?", wildcards.precision) is not None


def is_rounded(wildcards):
    return wildcards.precision != "fp32"


def is_brought(wildcards):
    """Whether a job fetches or makes the checkpoint."""
    return plan()["models"][wildcards.model]["kind"] != "folder"


def is_any_adapter_on_the_hub(wildcards):
    return plan()["models"][wildcards.model]["is_any_adapter_on_the_hub"]


def collected(pattern, word):
    """The files of all targets of a kind (src/lockstep/stages/rules.py), or of those of the device that a run is for."""

    def paths(wildcards):
        if DEVICE is not None and "{backend}" not in pattern:
            return []
        targets = [target for target in plan()["targets"][word] if DEVICE in (None, target["backend"])]
        return list(dict.fromkeys(pattern.format(**target) for target in targets))

    return paths


def certificates(wildcards):
    """The files of the config's endpoints; a run that is for one device asks none."""
    return [f"<results>/endpoints/{name}.json" for name in plan()["endpoints"] if DEVICE is None]


def compute_threads(wildcards):
    """Threads of a job that computes a whole model. Snakemake lowers it to the cores it was given."""
    size = weight_bytes(wildcards.model)
    # A small model is no faster with more threads; several jobs at once are.
    if size < 100_000_000:
        return 1
    return 4 if size < 2_000_000_000 else 16
