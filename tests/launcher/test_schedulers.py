"""launch/slurm.sbatch with stand-ins for Slurm's commands, launch/kubernetes.yaml by the schemas of Kubernetes.

No ranks are started. Under a real Slurm the script runs in tests/launcher/test_slurm.py.
"""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import ValidationError, latest_version, validate

from hybridflow.config import CheckpointConfig
from hybridflow.errors import ExitStatus
from hybridflow.launcher.arguments import parse
from tests.launcher.slurm_job import SBATCH, Job

pytestmark = pytest.mark.slow  # waits for processes

ROOT = Path(__file__).resolve().parents[2]
GRACE = CheckpointConfig().grace_seconds

# ------------------------------------------------------------------------------------------------ Slurm

WORDS = [
    "configs/x.yaml",
    "actor.optimizer={lr: 1.0e-6, name: \"a 'b' c\"}",
    "data.train=a $HOME `b` \\ *.jsonl",
    *("--", "--replay"),
]


def test_every_node_gets_its_rank_the_master_and_the_arguments_unchanged(tmp_path: Path) -> None:
    job = Job(tmp_path, *WORDS, STATUSES="0 0", ROOM="with a view")
    assert job.end()[0] == 0 and job.requeued is None
    for node in (0, 1):
        assert job.called(node) == {
            "argv": [
                *("--no-ssh", "--node-rank", str(node), "--nnodes", "2", "--nproc-per-node", "8"),
                *("--master-addr", "gpu-07", "--master-port", "24567", *WORDS),
            ],
            "ignores_usr1": True,
            "ROOM": "with a view",
        }
    assert set(json.loads((tmp_path / "srun.json").read_text())) == {
        *("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=192"),
        *("--export=ALL", "--kill-on-bad-exit=0", "--wait=900"),
    }


def test_the_launcher_understands_what_it_is_called_with(tmp_path: Path) -> None:
    job = Job(tmp_path, *WORDS, STATUSES="0 0")
    job.end()
    options = parse(job.called(1)["argv"], "")
    assert (options.no_ssh, options.node_rank, options.nnodes, options.nproc_per_node) == (True, 1, (2, 2), 8)
    assert (options.master_addr, options.master_port, options.config) == ("gpu-07", 24567, WORDS[0])
    assert (list(options.overrides), list(options.rest)) == (WORDS[1:3], WORDS[4:])


@pytest.mark.parametrize(
    ("statuses", "status"),
    [("1 1", 1), ("70 70", 70), ("76 76", 76), ("75 137", 137), ("127 0", 127)],
)
def test_a_job_that_has_failed_is_not_requeued(statuses: str, status: int, tmp_path: Path) -> None:
    job = Job(tmp_path, "x.yaml", STATUSES=statuses)
    assert job.end()[0] == status and job.requeued is None


def test_a_job_that_has_stopped_and_saved_is_requeued(tmp_path: Path) -> None:
    """By checkpoint.max_hours, without a signal."""
    job = Job(tmp_path, "x.yaml", STATUSES="75 75")
    status, out = job.end()
    assert (status, job.requeued) == (ExitStatus.STOPPED, "requeue 1234567")
    assert "stopped as told: job 1234567 is requeued and resumes" in out


@pytest.mark.parametrize("everyone", ["", "yes"])
def test_before_the_time_limit_every_node_is_told_once_and_the_job_requeued(everyone: str, tmp_path: Path) -> None:
    job = Job(tmp_path, "x.yaml", ALL=everyone)
    job.tell(signal.SIGUSR1)
    status, out = job.end()
    assert (status, job.requeued) == (ExitStatus.STOPPED, "requeue 1234567"), out


@pytest.mark.parametrize("limit", ["1-00:00:00", "00:20:00", "UNLIMITED"])
def test_a_job_that_is_told_while_it_loads_begins_again(limit: str, tmp_path: Path) -> None:
    job = Job(tmp_path, "x.yaml", LOADS="yes", LIMIT=limit)
    job.tell(signal.SIGUSR1)
    status, out = job.end()
    assert (status, job.requeued) == (ExitStatus.STOPPED, "requeue 1234567"), out
    assert "told while it was loading: there is nothing to save" in out


def test_a_time_limit_that_leaves_no_time_to_load_is_named(tmp_path: Path) -> None:
    """The next start would be told as early."""
    job = Job(tmp_path, "x.yaml", LOADS="yes", LIMIT="00:08:08")
    job.tell(signal.SIGUSR1)
    status, out = job.end()
    assert (status, job.requeued) == (1, None)
    assert "--time, 488 s: 600 s before its end (--signal) the run is told to save, and it was still" in out


def test_who_ends_it_while_it_loads_has_it_not_requeued(tmp_path: Path) -> None:
    job = Job(tmp_path, "x.yaml", LOADS="yes", LIMIT="1-00:00:00")
    job.tell(signal.SIGTERM)
    assert job.end()[0] == 128 + signal.SIGTERM and job.requeued is None


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, "8"),
        ({"SLURM_GPUS_PER_NODE": "4"}, "4"),
        ({"SLURM_GPUS_PER_NODE": "h100:2"}, "2"),
        ({"SLURM_GPUS_PER_NODE": "a100:4,h100:2"}, "6"),
        ({"SLURM_GPUS_PER_NODE": "4", "RANKS_PER_NODE": "1"}, "1"),
        ({"SLURM_GPUS_PER_NODE": "0", "SLURM_GPUS_ON_NODE": "", "RANKS_PER_NODE": "12"}, "12"),
    ],
)
def test_a_node_has_as_many_ranks_as_the_job_asks_for(variables: dict[str, str], ranks: str, tmp_path: Path) -> None:
    """SLURM_GPUS_ON_NODE, 8, is all that the node has where the job has it alone."""
    job = Job(tmp_path, "x.yaml", STATUSES="0 0", **variables)
    job.end()
    argv = job.called(1)["argv"]
    assert argv[argv.index("--nproc-per-node") + 1] == ranks


def test_who_wants_it_to_end_has_it_saved_and_not_requeued(tmp_path: Path) -> None:
    job = Job(tmp_path, "x.yaml")
    job.tell(signal.SIGTERM)
    assert job.end()[0] == ExitStatus.STOPPED and job.requeued is None


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "which config? sbatch launch/slurm.sbatch CONFIG"),
        (
            ["x.yaml"],
            {"SLURM_GPUS_ON_NODE": ""},
            "no GPUs by --gpus-per-node, and RANKS_PER_NODE is not set: export it",
        ),
        (["x.yaml"], {"RANKS_PER_NODE": "two"}, "RANKS_PER_NODE=two: the ranks of a node are a number from 1 on"),
        (["x.yaml"], {"SLURM_SUBMIT_DIR": "/"}, "/ is not the repository's root: run sbatch there"),
        (["x.yaml"], {"SLURM_SUBMIT_DIR": ""}, "SLURM_SUBMIT_DIR: is set by sbatch"),
    ],
)
def test_what_is_missing_is_named(
    arguments: list[str], environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, *arguments, STATUSES="0 0", **environment)
    status, out = job.end()
    assert status == 1 and message in out and not (tmp_path / "srun.json").exists()


def test_slurm_gives_a_run_the_time_to_save() -> None:
    lines = SBATCH.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    given = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")], "sbatch reads no further"
    options = dict(option.partition("=")[::2] for option in given)
    notice = re.fullmatch(r"B:USR1@(\d+)", options["signal"])
    assert notice and int(notice[1]) >= GRACE + 60 + 60, "Slurm may be a minute late"
    assert options["ntasks-per-node"] == "1" and {"requeue": "", "open-mode": "append"}.items() <= options.items()


# ------------------------------------------------------------------------------------------------ Kubernetes


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    loaded = list(yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text()))
    assert len({each["kind"] for each in loaded}) == len(loaded)
    return {each["kind"]: each for each in loaded}


@pytest.mark.parametrize("version", ["1.31", latest_version()])
def test_every_object_keeps_to_the_schema_of_its_kind(version: str, objects: dict[str, Any]) -> None:
    """Those of the oldest Kubernetes that the header names, and of the newest. Unknown keys are mistakes."""
    for each in objects.values():
        assert version.startswith(validate(each, version, strict=True))
    with pytest.raises(ValidationError, match="backoffLimitPerIndices"):
        validate(
            {**objects["Job"], "spec": {**objects["Job"]["spec"], "backoffLimitPerIndices": 3}}, version, strict=True
        )


@pytest.fixture(scope="module")
def container(objects: dict[str, Any]) -> dict[str, Any]:
    [container] = objects["Job"]["spec"]["template"]["spec"]["containers"]
    return container


def command_line(container: dict[str, Any], index: int) -> list[str]:
    """As the kubelet expands it in the pod of this index."""
    known = {each["name"]: each["value"] for each in container["env"]} | {"JOB_COMPLETION_INDEX": str(index)}
    return [re.sub(r"\$\((\w+)\)", lambda name: known[name[1]], word) for word in container["args"]]


def test_every_pod_is_a_node_and_finds_the_first(objects: dict[str, Any], container: dict[str, Any]) -> None:
    job, service = objects["Job"], objects["Service"]
    name, spec = job["metadata"]["name"], job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] > 1
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    words = command_line(container, 1)
    [port] = service["spec"]["ports"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert words[1:-1] == [
        *("/opt/hybridflow/launch/run.py", "--no-ssh", f"--nnodes={spec['completions']}", "--node-rank=1"),
        *(f"--nproc-per-node={gpus}", f"--master-addr={name}-0.{service['metadata']['name']}"),
        f"--master-port={port['port']}",
    ]
    assert words[0] == "python" and words[-1].endswith(".yaml")


def test_the_launcher_understands_the_pods_command(container: dict[str, Any]) -> None:
    options = parse(command_line(container, 1)[2:], "")
    assert (options.no_ssh, options.node_rank, options.nnodes, options.nproc_per_node) == (True, 1, (2, 2), 8)
    assert (options.master_addr, options.config) == ("hybridflow-0.hybridflow", "/work/my_experiment.yaml")


def test_every_volume_is_there_and_what_is_shared_outlives_the_pods(
    objects: dict[str, Any], container: dict[str, Any]
) -> None:
    pod, claim = objects["Job"]["spec"]["template"]["spec"], objects["PersistentVolumeClaim"]
    volumes = {volume.pop("name"): volume for volume in map(dict, pod["volumes"])}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts[container["workingDir"]] == {"persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"] and len(mounts) == len(volumes)


def test_a_pod_has_the_time_to_save(objects: dict[str, Any]) -> None:
    assert objects["Job"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= GRACE + 30


@pytest.mark.parametrize(
    ("status", "evicted", "action"),
    [
        (ExitStatus.STOPPED, False, "Ignore"),
        (ExitStatus.STOPPED, True, "Ignore"),
        (ExitStatus.NOT_SAVED, True, "Ignore"),
        (ExitStatus.ERROR, False, "Count"),
        (ExitStatus.HANG, False, "Count"),
        (ExitStatus.NOT_SAVED, False, "Count"),
        (137, False, "Count"),
    ],
)
def test_what_the_end_of_a_pod_means(status: int, evicted: bool, action: str, objects: dict[str, Any]) -> None:
    job = objects["Job"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "what podFailurePolicy asks for"
    assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"], job["podReplacementPolicy"]) == (3, 0, "Failed")
    [container] = job["template"]["spec"]["containers"]
    assert next(decisions(job["podFailurePolicy"]["rules"], container["name"], status, evicted)) == action


def decisions(rules: list[dict[str, Any]], container: str, status: int, evicted: bool) -> Iterator[str]:
    """Of the rules that apply, in their order, as the Job controller takes the first."""
    for rule in rules:
        if "onPodConditions" in rule:
            applies = evicted and {"type": "DisruptionTarget", "status": "True"} in rule["onPodConditions"]
        else:
            codes = rule["onExitCodes"]
            assert codes["containerName"] == container and 0 not in codes["values"]
            applies = (status in codes["values"]) == {"In": True, "NotIn": False}[codes["operator"]]
        if applies:
            yield rule["action"]
