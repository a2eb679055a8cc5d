"""Facts judged one by one: ok, a warning, or a problem that keeps a server from starting. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.cli.data_directory import DataDirectory
from holdfast.cli.machine import Library, Memory
from holdfast.cli.sizes import RUNTIME_BYTES, Sizes
from holdfast.engine.slab import SlabShape

Level = Literal["ok", "warning", "problem"]
Device = Literal["cpu", "cuda", "mlx", ""]  # empty: another server computes

_GB = 1_000_000_000
_MB = 1_000_000
_LITTLE_DISK_BYTES = _GB


@dataclass(frozen=True, slots=True)
class Finding:
    """`says` is one sentence; where the level is not ok it tells what to do."""

    what: str
    level: Level
    says: str


def chosen_device(asked: str, torch: Library, mlx: Library, *, is_apple_silicon: bool) -> Device:
    """What `--device` comes to on this machine."""
    if asked == "mlx" or (asked == "auto" and is_apple_silicon and mlx.version):
        return "mlx"
    return "cuda" if asked == "cuda" or (asked == "auto" and torch.cuda) else "cpu"


def judge_native(variants: Sequence[str], device: Device) -> Finding:
    """`variants`: the builds that this machine can run, best first."""
    if variants:
        return Finding("native engine", "ok", f"built for {variants[0]}")
    level: Level = "warning" if device == "cpu" else "ok"
    says = "not built, so torch computes, several times slower: install a C++ compiler, then holdfast again"
    return Finding("native engine", level, says)


def judge_torch(torch: Library, device: Device, *, is_needed: bool) -> Finding:
    level: Level = "problem" if is_needed and device in ("cpu", "cuda") else "ok"
    if torch.failure:
        return Finding("torch", level, f"{torch.version} does not import ({torch.failure}); install it again")
    if not torch.version:
        needed = "" if level == "problem" else ", and not needed for these settings"
        return Finding("torch", level, f"not installed{needed}: pip install 'holdfast[torch]' adds it")
    found = [f"{one.name} with {one.free_bytes / _GB:.1f} of {one.total_bytes / _GB:.1f} GB free" for one in torch.cuda]
    about = f"{torch.version}, {torch.num_threads} threads, {'; '.join(found) or 'no CUDA device'}"
    if device == "cuda" and not torch.cuda:
        return Finding("torch", "problem", f"{about}: use --device cpu, or install a driver and a torch with CUDA")
    return Finding("torch", "ok", about)


def judge_mlx(mlx: Library, device: Device, *, is_apple_silicon: bool) -> Finding:
    if mlx.failure:
        level: Level = "problem" if device == "mlx" else "warning"
        return Finding("MLX", level, f"{mlx.version} does not import ({mlx.failure}); install it again")
    add = "pip install 'holdfast[mlx]' adds it"
    if not mlx.version:
        if device == "mlx":
            return Finding("MLX", "problem", f"not installed, but --device mlx asks for it: {add}")
        if is_apple_silicon:
            return Finding("MLX", "warning", f"not installed: {add}, and this Mac then computes on its GPU")
        return Finding("MLX", "ok", "not installed, and of use on a Mac only")
    about = f"{mlx.version} on the {mlx.default_device}"
    if not is_apple_silicon:
        level = "warning" if device == "mlx" else "ok"
        return Finding("MLX", level, f"{about}: exact but slow here; --device cpu or cuda is faster")
    return Finding("MLX", "ok", f"{about}, {'which --device auto picks' if device == 'mlx' else 'not asked for'}")


def judge_extra(extra: str, adds: str, *, is_installed: bool) -> Finding:
    if is_installed:
        return Finding(extra, "ok", f"{adds}: installed")
    return Finding(extra, "warning", f"{adds}: not installed; pip install 'holdfast[{extra}]' adds it")


def judge_memory(memory: Memory) -> Finding:
    total = f"{memory.total_bytes / _GB:.1f} GB"
    if memory.available_bytes is None:
        return Finding("memory", "warning", f"{total}; the system does not tell how much is free, so leave some room")
    return Finding("memory", "ok", f"{memory.available_bytes / _GB:.1f} GB available of {total}")


def judge_data(data: DataDirectory | None) -> Finding:
    what = "data directory"
    if data is None:
        return Finding(what, "ok", "none: sessions end with the server; --data-dir DIR keeps them")
    other = "or give another --data-dir"
    if not data.is_writable:
        return Finding(what, "problem", f"{data.path} cannot be written: make it a directory that can be, {other}")
    if data.is_in_use:
        return Finding(what, "problem", f"{data.path} is in use by another server: stop that one, {other}")
    if data.damage:
        advice = "restore a backup, or move the directory away"
        return Finding(what, "problem", f"the journal in {data.path} cannot be used ({data.damage}): {advice}")
    record = f"{data.num_open} sessions on record and {data.num_closed} closed" if data.exists else "will be made"
    about = f"{data.path}: {record}, {data.free_bytes / _GB:.1f} GB free"
    if data.free_bytes < _LITTLE_DISK_BYTES:
        return Finding(what, "warning", f"{about}, which is little: make room, {other}")
    return Finding(what, "ok", about)


def judge_fit(sizes: Sizes, shape: SlabShape, num_sessions: int, snapshot_bytes: int, device: Device) -> Finding:
    """`snapshot_bytes`: what the caches of parked sessions may take of the host's memory later on."""
    what, slab = "sessions", sizes.slab_bytes(shape)
    need = sizes.weight_bytes + num_sessions * slab
    about = (
        f"{num_sessions} of {slab / _MB:,.0f} MB and {sizes.weight_bytes / _MB:,.0f} MB of weights "
        f"take {need / _GB:.1f} GB"
    )
    fitting = sizes.num_fitting(shape)
    if fitting is None or sizes.memory_bytes is None:
        return Finding(what, "warning", f"{about}: see that this much is free")
    if not fitting:
        return Finding(what, "problem", f"{about}, and not even one fits: use a smaller model or --recent")
    if fitting < num_sessions:
        return Finding(what, "problem", f"{about}, but {fitting} fit: lower --sessions to {fitting}, or --recent")
    if device != "cuda" and need + RUNTIME_BYTES + snapshot_bytes > sizes.memory_bytes:
        room = max(0, sizes.memory_bytes - need - RUNTIME_BYTES) // 2**20
        return Finding(
            what, "warning", f"{about}, and parked ones may take more than is left: use --snapshot-memory-mb {room}"
        )
    return Finding(what, "ok", f"{about}; {fitting} would fit")
