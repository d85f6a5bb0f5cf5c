"""Free memory: the system's own figure, and the limits of control groups read from real files."""

import torch

from gradtrail.attribution import memory
from gradtrail.machine import free_bytes, group_bytes

CPU = torch.device("cpu")
GIB = 1 << 30
V1_NONE = 9223372036854771712


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")
    return root


def v2(folder, limit, used, dropped=0):
    base = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{base}/memory.max": limit,
        f"{base}/memory.current": used,
        f"{base}/memory.stat": f"anon 5\ninactive_file {dropped}\nactive_file 7",
    }


def v1(folder, limit, used, dropped=0):
    base = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {
        f"{base}/memory.limit_in_bytes": limit,
        f"{base}/memory.usage_in_bytes": used,
        f"{base}/memory.stat": f"inactive_file 1\ntotal_inactive_file {dropped}",
    }


def test_free_memory_of_this_machine_is_plausible():
    free = free_bytes(CPU)
    assert isinstance(free, int)
    assert 1 << 20 < free < 1 << 50
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert free_bytes(CPU) < free + held.nbytes
    assert memory.free_bytes is free_bytes


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert group_bytes(tmp_path) is None


def test_version_2_limit(tmp_path):
    own = {"proc/self/cgroup": "0::/group/job"}
    write(tmp_path, own | v2("group/job", 4 * GIB, 3 * GIB, GIB))
    assert group_bytes(tmp_path) == 2 * GIB


def test_version_2_without_a_limit(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/job"} | v2("job", "max", GIB))
    assert group_bytes(tmp_path) is None


def test_the_tightest_group_above_counts(tmp_path):
    own = {"proc/self/cgroup": "0::/a/b/c"}
    groups = v2("a/b/c", 8 * GIB, GIB) | v2("a/b", "max", GIB) | v2("a", 3 * GIB, 2 * GIB)
    write(tmp_path, own | groups)
    assert group_bytes(tmp_path) == GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/"} | v2("", GIB, 2 * GIB))
    assert group_bytes(tmp_path) == 0


def test_version_2_beside_version_1(tmp_path):
    own = {"proc/self/cgroup": "4:cpu:/x\n0::/job"}
    write(tmp_path, own | v2("unified/job", 2 * GIB, GIB))
    assert group_bytes(tmp_path) == GIB


def test_version_1_limit(tmp_path):
    own = {"proc/self/cgroup": "7:cpu,cpuacct:/job\n4:memory:/job\n0::/"}
    write(tmp_path, own | v1("job", 2 * GIB, GIB, GIB // 2) | v1("", V1_NONE, 5 * GIB))
    assert group_bytes(tmp_path) == 3 * GIB // 2


def test_version_1_without_a_limit(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "4:memory:/job"} | v1("job", V1_NONE, GIB))
    assert group_bytes(tmp_path) is None


def test_a_group_seen_from_inside_a_container_is_the_mounts_own(tmp_path):
    own = {"proc/self/cgroup": "4:memory:/docker/0123"}
    write(tmp_path, own | v1("", 3 * GIB, GIB))
    assert group_bytes(tmp_path) == 2 * GIB
