"""The code that Inductor writes for CUDA, obtained without a GPU: ``python -m bench.cuda_code``.

A model is traced on the CPU as torch.compile does it. Before its joint graph is split, its fake tensors are moved to
CUDA, and Inductor is told of an H100. It then writes what it would write there, for the forward and the backward graph;
nothing is compiled or run. Plain is split by torch's own partitioner, the others by what ``backstash.compile_options``
hands to torch. Of each graph the kernels are counted, and the bytes that they read and write, by Inductor's own count
of what the buffers of a kernel have. A kernel of the forward graph whose text plain's has not is listed: it may round
in another place, and is a suspect if bits differ.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import backstash as bs
from backstash.compile.inductor.options import CompileOptions
from bench.cases import SEED
from bench.gpu import pages
from bench.gpu.g6 import bodies
from bench.results import Results
from bench.rounds import table

FORMAT = 1

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=85017493504,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    warp_size=32,
    gcnArchName="",
    L2_cache_size=50 << 20,
)
"""What CUDA says of the card for which code is written."""

Split = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
Made = tuple[nn.Module, Callable[[], Tensor]]


@dataclass(frozen=True)
class Kernel:
    """A kernel, or a call of a library, of a graph.

    Attributes:
        name: the operators that it computes, or the library's function.
        nbytes: bytes that it reads and writes.
        is_written: whether Inductor has written it, and it is no call of a library.
    """

    name: str
    nbytes: int
    is_written: bool


@dataclass(frozen=True)
class Code:
    """A graph's code.

    Attributes:
        text: the module that Inductor has written.
        kernels: in the order in which they run.
        saved_nbytes: bytes of a forward graph's results that its backward graph reads, inputs of it aside.
    """

    text: str
    kernels: tuple[Kernel, ...]
    saved_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(kernel.nbytes for kernel in self.kernels)


class _Obtained(BaseException):
    """Ends a compilation of which everything is known that is asked for."""


def codes(made: Made, options: CompileOptions | None) -> dict[str, Code]:
    """Returns the code of a model's ``"forward"`` and ``"backward"`` graph on CUDA.

    Args:
        made: a model, and its forward pass.
        options: a treatment; None for plain.
    """
    _, loss = made
    graphs: list[fx.GraphModule] = []
    outputs = 0

    def partition(joint: fx.GraphModule, inputs: Any, **keywords: Any) -> Any:
        nonlocal outputs
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.compile_fx import _recursive_joint_graph_passes

        outputs = keywords["num_fwd_outputs"]
        # Torch's passes over it compute constants, and make patterns of tensors: CUDA cannot make any here.
        _recursive_joint_graph_passes(joint, skip_invoke_subgraph=True, input_device=torch.device("cpu"))
        move_to_cuda(joint)
        moved = [node.meta["val"] for node in joint.graph.nodes if node.op == "placeholder"]
        split: Split = min_cut_rematerialization_partition if options is None else options.treatment.split
        lasting = keywords.pop("static_lifetime_input_indices", None)
        with as_h100():
            graphs.extend(split(joint, moved, compiler="inductor", static_lifetime_input_indices=lasting, **keywords))
        raise _Obtained

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_compiler  # type: ignore[attr-defined]
        from torch._inductor.decomposition import select_decomp_table

        compiler = make_boxed_compiler(lambda graph, inputs: graph)
        return aot_module_simplified(
            graph,
            inputs,
            compiler,
            compiler,
            partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

    import_module("torch._inductor.lowering")  # which torch's decompositions take to be there
    torch.compiler.reset()
    with suppress(_Obtained):
        torch.compile(loss, backend=backend, dynamic=False)()
    forward, backward = graphs
    saved = _saved_nbytes(forward, outputs)
    with as_h100():
        found = {"forward": _code(forward, False, saved), "backward": _code(backward, True, 0)}
    torch.compiler.reset()
    return found


def move_to_cuda(joint: fx.GraphModule) -> None:
    """Moves the fake tensors of a graph to CUDA, and has its operators make new ones there."""
    device = torch.device("cuda", 0)

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            mode = value.fake_mode  # type: ignore[attr-defined]  # of a fake tensor
            with mode, torch.utils._python_dispatch._disable_current_modes():
                meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return type(value)(mode, meta, device)  # type: ignore[call-arg, arg-type]  # a fake tensor's own arguments
        if isinstance(value, (tuple, list)):
            return type(value)(moved(each) for each in value)
        return value

    for node in joint.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = moved(node.meta["val"])
        node.meta.pop("tensor_meta", None)
        for name, argument in node.kwargs.items():
            if isinstance(argument, torch.device):
                node.update_kwarg(name, device)
        node.args = tuple(device if isinstance(each, torch.device) else each for each in node.args)


@contextmanager
def as_h100() -> Iterator[None]:
    """Inside, torch believes that CUDA is there, as far as writing code asks it."""
    from torch._dynamo import device_interface
    from torch._inductor import config

    with ExitStack() as stack:
        patches: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_device_properties": lambda device=None: H100,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_name": lambda device=None: H100.name,
            "set_device": lambda device: None,
            "_exchange_device": lambda device: 0,
            "_maybe_exchange_device": lambda device: 0,
            "synchronize": lambda device=None: None,
            "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": lambda state, device="cuda": None,
            "is_bf16_supported": lambda including_emulation=True: True,
        }
        for name, function in patches.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
            if hasattr(device_interface.CudaInterface, name):
                stack.enter_context(mock.patch.object(device_interface.CudaInterface, name, staticmethod(function)))
        interface = device_interface.CudaInterface
        stack.enter_context(
            mock.patch.object(interface.Worker, "get_device_properties", staticmethod(lambda device=None: H100))
        )
        stack.enter_context(mock.patch.object(interface.Worker, "current_device", staticmethod(lambda: 0)))
        stack.enter_context(
            mock.patch.object(interface, "get_compute_capability", staticmethod(lambda device=None: 90))
        )
        stack.enter_context(mock.patch.object(interface, "get_raw_stream", staticmethod(lambda device: 0)))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        # The operator would switch to the device of a fake tensor, which is not there.
        stack.enter_context(mock.patch.object(Tensor, "__invert__", lambda x: torch.bitwise_not(x)))
        stack.enter_context(mock.patch("torch._inductor.scheduler.has_triton", return_value=True))
        stack.enter_context(mock.patch("torch.utils._triton.triton_hash_with_backend", return_value="no driver"))
        stack.enter_context(
            config.patch({"compile_threads": 1, "force_disable_caches": True, "triton.autotune_at_compile_time": False})
        )
        yield


def _code(graph: fx.GraphModule, is_backward: bool, saved_nbytes: int) -> Code:
    """Returns what Inductor writes for a graph whose fake tensors are on CUDA."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import BoxedBool

    found: list[Code] = []

    def stop(lowering: Any) -> Any:
        wrapper, _ = lowering.codegen()
        _, counts, _ = lowering.count_bytes()
        kernels = tuple(
            Kernel(_name(node), 4 * elements, not _is_extern(node))
            for node, elements in counts
            if not _is_nothing(node)
        )
        found.append(Code(wrapper.value, kernels, saved_nbytes))
        raise _Obtained

    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = next(each.fake_mode for each in inputs if isinstance(each, Tensor))  # type: ignore[attr-defined]

    def written_into(inp: Tensor, src: Tensor, view_ops: Any) -> Tensor:
        """Stands for a copy into a part of a tensor, which fake tensors on CUDA refuse where there is none."""
        return inp

    stopping = mock.patch.object(GraphLowering, "compile_to_module", stop)
    scattering = mock.patch("torch._inductor.fx_passes.reinplace._inplace_generalized_scatter", written_into)
    # Its nodes have their fake tensors, and some operators cannot make other ones where there is no CUDA.
    knowing = mock.patch("torch._inductor.compile_fx.fake_tensor_prop", return_value=mode)
    no_graphs = BoxedBool(False)
    with tracing(TracingContext(mode)), stopping, knowing, scattering, suppress(_Obtained):
        compile_fx_inner(graph, inputs, is_backward=is_backward, cudagraphs=no_graphs, graph_id=0)
    return found[0]


def _is_extern(node: Any) -> bool:
    return bool(node.is_extern() or node.is_template())


def _is_nothing(node: Any) -> bool:
    """Whether a node of the schedule launches nothing: views, and what only orders others."""
    from torch._inductor.scheduler import NopKernelSchedulerNode

    return isinstance(node, NopKernelSchedulerNode)


def _name(node: Any) -> str:
    if _is_extern(node):
        kernel = node.node
        return str(
            getattr(kernel, "python_kernel_name", None) or getattr(kernel, "op_overload", None) or type(kernel).__name__
        )
    origins = (
        [str(getattr(origin.target, "__name__", origin.target)) for origin in node.node.origins] if node.node else []
    )
    if not origins:
        members = [each.node for each in node.get_nodes() if each.node is not None]
        origins = [str(getattr(o.target, "__name__", o.target)) for member in members for o in member.origins]
    return " ".join(sorted({origin.partition(".")[0] for origin in origins}))


def _saved_nbytes(forward: fx.GraphModule, outputs: int) -> int:
    """Returns the bytes of what a forward graph saves for its backward graph, but for its inputs."""
    results = forward.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    saved = {node for node in results[outputs:] if isinstance(node, fx.Node) and node.op != "placeholder"}
    values = [node.meta["val"] for node in saved]
    return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, Tensor))


# -- the networks ------------------------------------------------------------------------------------------------------


def _under_autocast(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss()

    return autocast


def _gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    nothing: dict[str, Any] = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config: Any = GPT2Config(n_embd=768, n_layer=2, n_head=12, n_positions=512, use_cache=False, **nothing)
    module: Any = GPT2LMHeadModel(config).train()
    words = torch.randint(config.vocab_size, (8, 512))

    def loss() -> Tensor:
        return functional.cross_entropy(module(words).logits.flatten(0, 1), words.flatten())

    return module, _under_autocast(loss)


def _llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    config: Any = LlamaConfig(vocab_size=32000, num_hidden_layers=2, use_cache=False, **sizes)
    module: Any = LlamaForCausalLM(config).train()
    words = torch.randint(config.vocab_size, (4, 1024))

    def loss() -> Tensor:
        return functional.cross_entropy(module(words).logits.flatten(0, 1), words.flatten())

    return module, _under_autocast(loss)


def _resnet50() -> Made:
    from tests.networks.resnet import resnet

    module = resnet(num_classes=1000, width=64).train()
    images, labels = torch.randn(32, 3, 224, 224), torch.zeros(32, dtype=torch.long)
    return module, lambda: functional.cross_entropy(module(images), labels)


def _unet() -> Made:
    from tests.networks.unet import UNet

    module = UNet(width=64, levels=5).train()
    images, labels = torch.randn(4, 3, 256, 256), torch.zeros(4, 256, 256, dtype=torch.long)
    return module, lambda: functional.cross_entropy(module(images), labels)


NETWORKS: dict[str, tuple[str, Callable[[], Made]]] = {
    "gpt2": ("GPT-2 of 2 layers, 8 texts of 512 tokens, autocast to bfloat16", _gpt2),
    "llama": ("a Llama of 2 layers, 4 texts of 1,024 tokens, autocast to bfloat16", _llama),
    "resnet50": ("ResNet-50, 32 images of 224x224, float32", _resnet50),
    "unet": ("U-Net, 64 channels, 4 images of 256x256, float32", _unet),
}

PLAIN = "plain"

WAYS: dict[str, Callable[[], CompileOptions | None]] = {
    PLAIN: lambda: None,
    "lossless": lambda: bs.compile_options("lossless"),
    "lossless, budget 60%": lambda: bs.compile_options("lossless", budget="60%"),
    "quantized, 4 bits": lambda: bs.compile_options(bs.policies.quantized(bits=4)),
}


@dataclass(frozen=True)
class Row:
    """A graph in one way.

    Attributes:
        graph: ``"forward"`` or ``"backward"``.
        written, library: kernels that Inductor has written, and calls of libraries.
        nbytes: bytes that they read and write.
        saved_nbytes: of a forward graph, what it saves for backward.
        other: kernels whose text plain's graph has not.
        suspects: of a forward graph, the operators of these.
    """

    graph: str
    written: int
    library: int
    nbytes: int
    saved_nbytes: int
    other: int
    suspects: tuple[str, ...] = ()


def rows(found: dict[str, Code], plain: dict[str, Code]) -> list[Row]:
    """Returns a row for each graph."""
    made = []
    for graph, code in found.items():
        known = Counter(bodies(code.text)) - Counter(bodies(plain[graph].text))
        written = sum(kernel.is_written for kernel in code.kernels)
        suspects = tuple(sorted(_operators(text) for text in known.elements())) if graph == "forward" else ()
        made.append(
            Row(graph, written, len(code.kernels) - written, code.nbytes, code.saved_nbytes, known.total(), suspects)
        )
    return made


def _operators(body: str) -> str:
    """Returns the functions of Triton that a kernel calls: what it computes, for somebody who looks for a rounding."""
    return " ".join(sorted(set(re.findall(r"(?:libdevice|tl|tl_math|triton_helpers)\.(\w+)\(", body))))


def shown(words: str, ways: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the graphs of a network as a table."""
    plain = {row["graph"]: row for row in ways[PLAIN]}
    rows = [pages.graph(way, row, plain[row["graph"]]) for way, each in ways.items() for row in each]
    return f"{words}\n{table(pages.GRAPHS, rows)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Obtains the code, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--text", type=Path, help="a folder for the code")
    parser.add_argument("--resume", action="store_true", help="leave out the networks that the file has")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args(arguments)
    results = Results("bench.cuda_code", options.json, arguments, format=FORMAT, resume=options.resume)
    networks: dict[str, dict[str, Any]] = results.found.setdefault("networks", {})
    for name in options.networks:
        if name in networks:
            continue
        torch.manual_seed(SEED)
        made = NETWORKS[name][1]()
        plain: dict[str, Code] = {}
        ways: dict[str, Any] = {}
        for way in (PLAIN, *(each for each in options.ways if each != PLAIN)):
            found = codes(made, WAYS[way]())
            plain = plain or found
            ways[way] = [asdict(row) for row in rows(found, plain)]
            for graph, code in found.items():
                if options.text is not None:
                    options.text.mkdir(parents=True, exist_ok=True)
                    (options.text / f"{name}-{re.sub('[^a-z0-9]+', '_', way)}-{graph}.py").write_text(code.text)
        networks[name] = ways
        results.write(networks=networks, words={name: words for name, (words, _) in NETWORKS.items()})
        print(shown(NETWORKS[name][0], ways), flush=True)
    print(results.close())


if __name__ == "__main__":
    main()
