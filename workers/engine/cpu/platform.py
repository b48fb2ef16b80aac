"""The platform class that SGLang loads; see the package."""

from __future__ import annotations

from typing import Any

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
        """PyTorch's own attention."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """The methods that SGLang calls: `forward_native`."""
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        """Pinning serves copies to a device, of which there is none."""
        return False


if not hasattr(SRTPlatform, "get_kv_pool_cls"):
    # SGLang 0.5.17 has no defaults for these: newer versions take the same ones by themselves.

    def _mha_pool(_platform: InferbusCpuPlatform) -> Any:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def _mla_pool(_platform: InferbusCpuPlatform) -> Any:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def _allocator(_platform: InferbusCpuPlatform) -> Any:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        def make(size: int, *, page_size: int, **rest: Any) -> Any:
            if page_size != 1:
                raise ValueError(
                    "this SGLang has a page size of 1 alone on a CPU: the paged one needs Triton"
                )
            return TokenToKVPoolAllocator(size, **rest)

        return make

    InferbusCpuPlatform.get_mha_kv_pool_cls = _mha_pool
    InferbusCpuPlatform.get_mla_kv_pool_cls = _mla_pool
    InferbusCpuPlatform.get_paged_allocator_cls = _allocator
