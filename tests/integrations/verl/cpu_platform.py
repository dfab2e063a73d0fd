"""A CPU platform for verl, which ships none: gloo, and a device module without memory statistics."""

from __future__ import annotations

import contextlib
import types

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_MODULE = types.SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[0] != "_"}
)
for _name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
    setattr(_MODULE, _name, lambda *_: 0)
for _name in ("empty_cache", "synchronize", "manual_seed", "manual_seed_all", "set_device"):
    setattr(_MODULE, _name, lambda *_: None)
_MODULE.mem_get_info, _MODULE.get_device_name = lambda *_: (0, 0), lambda *_: "cpu"
_MODULE.current_device, _MODULE.is_available, _MODULE.device_count = (
    lambda: "cpu",
    lambda: True,
    lambda: 1,
)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = _MODULE

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def communication_backend_name(self):
        return "gloo"

    def get_device_capability(self, device_index=0):
        return (None, None)

    def visible_devices_envvar(self):
        return "NO_DEVICES"

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def _nothing(self, *_, **__):
        return None

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = (
        empty_cache
    ) = _nothing
    profiler_start = profiler_stop = cudart = _nothing
