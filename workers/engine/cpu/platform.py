"""The platform class that SGLang loads; see the package."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class InferbusCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """A CPU without SGLang's CPU kernels.

    `OOT` instead of `CPU` is the point: SGLang takes the paths of native PyTorch for a platform that
    it does not know, and paths that need `sgl_kernel` for `CPU`.
    """

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False
