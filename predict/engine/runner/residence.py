"""Where a network's weights and caches lie: on its device, in the host's memory, or nowhere.

Tensors stay the same objects, and get other memory: whoever holds one goes on with it. What keeps
addresses (the bound layers, CUDA graphs) is told by `rebind`, and finds them again, or is recorded
again, with the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from predict.device import cuda, devices
from predict.system.host import give_back_memory

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.device.devices import Device


class Residence:
    """The tensors of one network. Nothing may run while they move."""

    def __init__(
        self,
        gpu: Device | None,
        weights: Iterable[Tensor],
        kept: Iterable[Tensor],
        scratch: Iterable[Tensor],
        rebind: Callable[[], None],
    ) -> None:
        """gpu: where the tensors lie; None: on the CPU.

        kept: small ones that no checkpoint has. scratch: whose content
        nobody needs; those that are kept may be among them. rebind: called
        when the memory is another one.
        """
        self._gpu, self._rebind = gpu, rebind
        self.weights, self._kept = _each_once(weights), _each_once(kept)
        others = {id(each) for each in (*self.weights, *self._kept)}
        self._scratch = [each for each in _each_once(scratch) if id(each) not in others]
        self._on_host: dict[int, Any] = {}  # pinned values of tensors, by id
        self.level = 0  # 0: all is in its place

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(each.size * each.element_size() for each in self.weights)

    def leave(self, level: int) -> None:
        """Gives the memory back: of level 1 the weights are kept on the host, of 2 dropped.

        Raises, with everything in its place, where the host has no room for them.
        """
        moved = self._kept if level == 2 else [*self.weights, *self._kept]
        if self._gpu is not None:
            self._on_host = self._copied(self._gpu, moved)
        dropped = self.weights if self._gpu is not None or level == 2 else []
        kept = self._kept if self._gpu is not None else []
        for tensor in (*dropped, *kept, *self._scratch):
            tensor._clear_data()
        self._rebind()
        self._give_back()
        self.level = level

    def come_back(self, fresh: Sequence[Tensor] | None = None) -> None:
        """Puts everything into new memory. Raises, with nothing moved, where there is none.

        fresh: in place of the weights, in their order; needed after level 2.
        """
        import paddle

        made = list[tuple[Any, Any]]()  # a tensor, and one with its new memory
        values = [*self._kept]
        if fresh is None:
            values += self.weights
        else:
            made += zip(self.weights, fresh, strict=True)
        try:
            made += [(each, paddle.empty(each.shape, each.dtype)) for each in self._scratch]
            if self._gpu is not None:
                made += self._uploaded(self._gpu, values)
        except BaseException:
            made.clear()
            self._give_back()
            raise
        for tensor, new in made:
            new._share_buffer_to(tensor)
        self._on_host = {}
        self._rebind()
        self.level = 0

    def _copied(self, gpu: Device, tensors: Sequence[Tensor]) -> dict[int, Any]:
        stream, found = cuda.current_stream(gpu), dict[int, Any]()
        for tensor in tensors:
            array = cuda.pinned([tensor.size * tensor.element_size()], "uint8")
            cuda.copy_front_to_host(array, tensor, stream)
            found[id(tensor)] = array
        _wait(stream)
        return found

    def _uploaded(self, gpu: Device, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        import paddle

        stream, made = cuda.current_stream(gpu), list[Any]()
        for tensor in tensors:
            new = paddle.empty(tensor.shape, tensor.dtype)
            cuda.copy_to_device(new, self._on_host[id(tensor)], stream)
            made.append((tensor, new))
        _wait(stream)
        return made

    def _give_back(self) -> None:
        if self._gpu is None:
            give_back_memory()
        elif self._gpu.is_plugin:
            devices.release_cached(self._gpu)


def _each_once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Without those that come twice (a table that is the head's matrix), and empty ones."""
    return list({id(each): each for each in tensors if each.size}.values())


def _wait(stream: int) -> None:
    done = cuda.Event()
    done.record(stream)
    done.synchronize()
