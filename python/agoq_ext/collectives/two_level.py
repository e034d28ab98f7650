"""Two levels of ranks: those of a node, which are near each other, and the nodes, between which links are slow."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .channel import Channel, resolve_group
from .wire import Codec


class TwoLevel:
    """Takes the place of a group in `all_reduce`: exact or 8-bit inside a node, the call's format between nodes.

    Every rank belongs to one `inner` group, its node, and to one `outer` group, the ranks with its place in the other
    nodes. All nodes have the same number of ranks. The mean is over all ranks of all nodes.

    Args:
        inner: the group of this rank's node.
        outer: the group of the ranks with the same rank in their `inner` group.
        inner_format: "float32", "bfloat16", or a format of `agoq_ext.quantize`, e.g. "int8".
    """

    def __init__(
        self, inner: dist.ProcessGroup, outer: dist.ProcessGroup, inner_format: str = "float32"
    ) -> None:
        self.inner = resolve_group("TwoLevel", inner)
        self.outer = resolve_group("TwoLevel", outer)
        self.inner_format = inner_format
        Codec(inner_format).check("TwoLevel")

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, inner_format: str = "float32") -> TwoLevel:
        """The two dimensions of a mesh: the first one between nodes, the second one inside them.

        Raises:
            ValueError: the mesh does not have two dimensions.
        """
        if mesh.ndim != 2:
            raise ValueError(
                f"TwoLevel: mesh must have 2 dimensions (nodes, ranks of a node); got {mesh.ndim}"
            )
        return cls(mesh.get_group(1), mesh.get_group(0), inner_format)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """(inner, outer)."""
        return self.inner, self.outer

    @property
    def world(self) -> int:
        """Ranks of all nodes together."""
        return self.inner.size() * self.outer.size()

    def channel(self) -> Channel:
        """What this process keeps for the pair; one however many objects name it, since each has connections."""
        channels = _channels.setdefault(self.inner, weakref.WeakKeyDictionary())
        channel = channels.get(self.outer)
        if channel is None:
            channel = channels[self.outer] = Channel(self.inner, self.outer)
            weakref.finalize(self.outer, channel.close).atexit = False
        return channel


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakKeyDictionary[dist.ProcessGroup, Channel]]
_channels = weakref.WeakKeyDictionary()
