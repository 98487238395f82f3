"""Models of torchvision, timm and transformers, small enough for a few steps on one core. None is imported before use.

Those of transformers are in :mod:`studies.zoo_transformers`. Others are built without weights, for ten classes
and small images, and trained with everything that its authors have switched on for training: dropout, stochastic depth,
auxiliary heads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from studies import zoo_transformers
from studies.unseen.program import Program

CLASSES = 10

SEED = 7
"""Of weights and batches."""


@dataclass(frozen=True)
class Entry:
    """How one model is built and fed.

    Attributes:
        maker: the path of the function that builds the model, below the library: ``"models.resnet18"``. Empty for an
            architecture of transformers, which its name says.
        shape: of the batch: ``[N, 3, H, W]`` for images, ``[N, 3, T, H, W]`` for videos, ``[N, L]`` for words.
        settings: keyword arguments of the maker.
        task: ``"classes"`` for a class of each image, pixel or video; ``"boxes"`` for the torchvision detectors, which
            compute their own losses; ``"flow"`` for a pair of images.
        compiled: the backend with which compiled steps are compared. Inductor takes minutes on larger models.
    """

    maker: str
    shape: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    task: str = "classes"
    compiled: str = "aot_eager"


def _vision(name: str, size: int = 64, batch: int = 4, compiled: str = "aot_eager", **settings: Any) -> Entry:
    return Entry(f"models.{name}", (batch, 3, size, size), {"num_classes": CLASSES} | settings, compiled=compiled)


def _pixels(name: str) -> Entry:
    settings = {"weights_backbone": None, "num_classes": CLASSES, "aux_loss": True}
    if name.startswith("lraspp"):
        del settings["aux_loss"]
    return Entry(f"models.segmentation.{name}", (2, 3, 64, 64), settings)


def _boxes(name: str, **settings: Any) -> Entry:
    plain = {"weights": None, "weights_backbone": None, "num_classes": 5, "trainable_backbone_layers": None}
    return Entry(f"models.detection.{name}", (2, 3, 96, 96), plain | settings, "boxes")


def _video(name: str, frames: int = 8, size: int = 32, **settings: Any) -> Entry:
    return Entry(f"models.video.{name}", (2, 3, frames, size, size), {"num_classes": CLASSES} | settings)


_SCALED = {"min_size": 96, "max_size": 128}

_MAXVIT = {
    "input_size": (64, 64),
    "stem_channels": 32,
    "partition_size": 4,
    "block_channels": [32, 64],
    "block_layers": [1, 2],
    "head_dim": 16,
    "stochastic_depth_prob": 0.2,
    "num_classes": CLASSES,
}
"""The library's own sizes need images of 224 x 224."""

TORCHVISION: dict[str, Entry] = {
    "squeezenet1_0": _vision("squeezenet1_0"),
    "squeezenet1_1": _vision("squeezenet1_1", compiled="inductor"),
    "googlenet": _vision("googlenet", 96, 2, init_weights=False, aux_logits=True),
    "inception_v3": _vision("inception_v3", 96, 2, init_weights=False, aux_logits=False),
    "densenet121": _vision("densenet121"),
    "densenet121, memory_efficient": _vision("densenet121", memory_efficient=True, compiled=""),
    "resnet18": _vision("resnet18", compiled="inductor"),
    "resnet50": _vision("resnet50"),
    "resnext50_32x4d": _vision("resnext50_32x4d"),
    "wide_resnet50_2": _vision("wide_resnet50_2"),
    "mobilenet_v2": _vision("mobilenet_v2", compiled="inductor"),
    "mobilenet_v3_small": _vision("mobilenet_v3_small"),
    "mobilenet_v3_large": _vision("mobilenet_v3_large"),
    "efficientnet_b0": _vision("efficientnet_b0"),
    "efficientnet_v2_s": _vision("efficientnet_v2_s", 64, 2),
    "regnet_x_400mf": _vision("regnet_x_400mf"),
    "regnet_y_400mf": _vision("regnet_y_400mf"),
    "shufflenet_v2_x0_5": _vision("shufflenet_v2_x0_5", compiled="inductor"),
    "shufflenet_v2_x1_0": _vision("shufflenet_v2_x1_0"),
    "mnasnet0_5": _vision("mnasnet0_5"),
    "mnasnet1_0": _vision("mnasnet1_0"),
    "convnext_tiny": _vision("convnext_tiny"),
    "swin_t": _vision("swin_t"),
    "swin_v2_t": _vision("swin_v2_t"),
    "vit_b_16": _vision("vit_b_16", image_size=64),
    "maxvit, two stages": Entry("models.maxvit.MaxVit", (4, 3, 64, 64), _MAXVIT),
    "fcn_resnet50": _pixels("fcn_resnet50"),
    "deeplabv3_resnet50": _pixels("deeplabv3_resnet50"),
    "deeplabv3_mobilenet_v3_large": _pixels("deeplabv3_mobilenet_v3_large"),
    "lraspp_mobilenet_v3_large": _pixels("lraspp_mobilenet_v3_large"),
    "fasterrcnn_mobilenet_v3_large_320_fpn": _boxes("fasterrcnn_mobilenet_v3_large_320_fpn", **_SCALED),
    "fasterrcnn_resnet50_fpn": _boxes("fasterrcnn_resnet50_fpn", **_SCALED),
    "fasterrcnn_resnet50_fpn_v2": _boxes("fasterrcnn_resnet50_fpn_v2", **_SCALED),
    "maskrcnn_resnet50_fpn": _boxes("maskrcnn_resnet50_fpn", **_SCALED),
    "retinanet_resnet50_fpn": _boxes("retinanet_resnet50_fpn", **_SCALED),
    "fcos_resnet50_fpn": _boxes("fcos_resnet50_fpn", **_SCALED),
    "ssd300_vgg16": _boxes("ssd300_vgg16"),
    "ssdlite320_mobilenet_v3_large": _boxes("ssdlite320_mobilenet_v3_large"),
    "r3d_18": _video("r3d_18"),
    "mc3_18": _video("mc3_18"),
    "r2plus1d_18": _video("r2plus1d_18"),
    "s3d": _video("s3d", 16, 224),
    "mvit_v1_b": _video("mvit_v1_b", 16, 224),
    "mvit_v2_s": _video("mvit_v2_s", 16, 224),
    "swin3d_t": _video("swin3d_t", 4, 64),
    "alexnet": _vision("alexnet"),
    "vgg11_bn": _vision("vgg11_bn", 32),
    "raft_small": Entry("models.optical_flow.raft_small", (1, 3, 128, 128), {}, "flow"),
    "raft_large": Entry("models.optical_flow.raft_large", (1, 3, 128, 128), {}, "flow"),
}


def _timm(name: str, size: int = 64, batch: int = 4, compiled: str = "aot_eager", **settings: Any) -> Entry:
    settings = {"model_name": name, "num_classes": CLASSES} | settings
    return Entry("create_model", (batch, 3, size, size), settings, compiled=compiled)


def _sized(name: str, size: int = 64, batch: int = 4, **settings: Any) -> Entry:
    return _timm(name, size, batch, img_size=size, **settings)


TIMM: dict[str, Entry] = {
    "resnet18": _timm("resnet18", drop_rate=0.1, drop_path_rate=0.1),
    "resnet18d": _timm("resnet18d"),
    "resnetblur18": _timm("resnetblur18"),
    "seresnet18": _timm("seresnet18"),
    "ecaresnet50t": _timm("ecaresnet50t", 64, 2),
    "skresnet18": _timm("skresnet18"),
    "resnest14d": _timm("resnest14d"),
    "res2net50_26w_4s": _timm("res2net50_26w_4s", 64, 2),
    "resnetv2_50": _timm("resnetv2_50", 64, 2),
    "regnety_002": _timm("regnety_002"),
    "rexnet_100": _timm("rexnet_100"),
    "efficientnet_b0": _timm("efficientnet_b0", drop_rate=0.2, drop_path_rate=0.2),
    "mixnet_s": _timm("mixnet_s"),
    "tinynet_e": _timm("tinynet_e"),
    "mobilenetv4_conv_small": _timm("mobilenetv4_conv_small", compiled="inductor"),
    "hrnet_w18_small": _timm("hrnet_w18_small", 64, 2),
    "coat_lite_tiny": _sized("coat_lite_tiny"),
    "pit_ti_224": _sized("pit_ti_224"),
    "deit_tiny_patch16_224": _sized("deit_tiny_patch16_224", drop_path_rate=0.1),
    "deit_tiny_distilled_patch16_224": _sized("deit_tiny_distilled_patch16_224"),
    "deit3_small_patch16_224": _sized("deit3_small_patch16_224", drop_path_rate=0.1),
    "vit_tiny_patch16_224": _sized("vit_tiny_patch16_224", proj_drop_rate=0.1, attn_drop_rate=0.1, compiled="inductor"),
    "beit_base_patch16_224": _sized("beit_base_patch16_224", 64, 2),
    "beitv2_base_patch16_224": _sized("beitv2_base_patch16_224", 64, 2),
    "swin_tiny_patch4_window7_224": _sized("swin_tiny_patch4_window7_224", window_size=2),
    "swinv2_tiny_window8_256": _sized("swinv2_tiny_window8_256", window_size=2),
    "mixer_s32_224": _sized("mixer_s32_224", compiled="inductor"),
    "gmlp_ti16_224": _sized("gmlp_ti16_224"),
    "resmlp_12_224": _sized("resmlp_12_224"),
    "poolformer_s12": _timm("poolformer_s12"),
    "poolformerv2_s12": _timm("poolformerv2_s12"),
    "levit_128s": _sized("levit_128s"),
    "mobilevit_xxs": _timm("mobilevit_xxs"),
    "mobilevitv2_050": _timm("mobilevitv2_050"),
    "edgenext_xx_small": _timm("edgenext_xx_small"),
    "convmixer_768_32": _timm("convmixer_768_32", 56, 2),
    "convnext_atto": _timm("convnext_atto", drop_path_rate=0.1),
    "convnextv2_atto": _timm("convnextv2_atto"),
    "nfnet_l0": _timm("nfnet_l0", 64, 2),
    "dm_nfnet_f0": _timm("dm_nfnet_f0", 64, 2, compiled=""),
    "xcit_nano_12_p16_224": _sized("xcit_nano_12_p16_224"),
    "cait_xxs24_224": _sized("cait_xxs24_224", drop_path_rate=0.1),
    "volo_d1_224": _sized("volo_d1_224", 64, 2),
    "crossvit_tiny_240": _sized("crossvit_tiny_240", 120, 2),
    "visformer_tiny": _sized("visformer_tiny", compiled="inductor"),
    "repvgg_a0": _timm("repvgg_a0"),
    "vgg11_bn": _timm("vgg11_bn", 64, 2),
    "darknet53": _timm("darknet53", 64, 2),
    "cspresnet50": _timm("cspresnet50", 64, 2),
    "ghostnet_050": _timm("ghostnet_050"),
    "eva02_tiny_patch14_224": _sized("eva02_tiny_patch14_224", 56),
    "maxvit_rmlp_pico_rw_256": _timm("maxvit_rmlp_pico_rw_256", 64, 2, img_size=64),
    "focalnet_tiny_srf": _timm("focalnet_tiny_srf"),
    "davit_tiny": _timm("davit_tiny", 64, 2),
    "coatnet_nano_rw_224": _sized("coatnet_nano_rw_224", 64, 2),
    "dla34": _timm("dla34"),
    "dpn48b": _timm("dpn48b", 64, 2),
    "densenet121": _timm("densenet121", 64, 2),
    "inception_v4": _timm("inception_v4", 96, 2),
    "xception41": _timm("xception41", 64, 2),
    "selecsls42b": _timm("selecsls42b"),
    "hardcorenas_a": _timm("hardcorenas_a"),
    "lcnet_050": _timm("lcnet_050"),
    "fastvit_t8": _timm("fastvit_t8"),
    "efficientformer_l1": _timm("efficientformer_l1", 224, 2, compiled=""),
    "efficientformerv2_s0": _sized("efficientformerv2_s0", 64, 2),
    "efficientvit_b0": _timm("efficientvit_b0"),
    "efficientvit_m0": _timm("efficientvit_m0", 128, 2),
    "repvit_m0_9": _timm("repvit_m0_9"),
    "inception_next_tiny": _timm("inception_next_tiny", 64, 2),
    "metaformer: caformer_s18": _timm("caformer_s18", 64, 2),
    "nest_tiny": _sized("nest_tiny", 64, 2),
    "pvt_v2_b0": _timm("pvt_v2_b0"),
    "sequencer2d_s": _timm("sequencer2d_s", 56, 2),
    "tnt_s_patch16_224": _sized("tnt_s_patch16_224", 64, 2),
    "tresnet_m": _timm("tresnet_m", 64, 2),
    "twins_svt_small": _sized("twins_svt_small", 64, 2),
    "hiera_tiny_224": _sized("hiera_tiny_224", 64, 2),
    "starnet_s1": _timm("starnet_s1"),
    "halonet26t": _timm("halonet26t", 64, 2),
    "lambda_resnet26t": _timm("lambda_resnet26t", 64, 2, img_size=64),
    "botnet26t_256": _timm("botnet26t_256", 64, 2, img_size=64),
}

TRANSFORMERS = {name: Entry("", (zoo_transformers.BATCH, zoo_transformers.WORDS)) for name in zoo_transformers.NAMES}

LIBRARIES = {"torchvision": TORCHVISION, "timm": TIMM, "transformers": TRANSFORMERS}


def build(library: str, name: str) -> Program:
    """Makes a model and its step; the same weights and numbers at every call.

    Raises:
        ImportError: the library is not installed.
        KeyError: there is no such model here.
    """
    entry = LIBRARIES[library][name]
    if library == "transformers":
        return zoo_transformers.build(name)
    torch.manual_seed(SEED)
    module, _, maker = f"{library}.{entry.maker}".rpartition(".")
    model: nn.Module = getattr(importlib.import_module(module), maker)(**entry.settings).train()
    x = torch.randn(entry.shape)
    losses = {"classes": _classes, "boxes": _boxes_loss, "flow": _flow}
    loss = losses[entry.task](model, x)
    return Program(model, lambda: loss().backward())


def _classes(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """One loss for every output: a class for each image, or for each of its pixels."""
    labels = torch.randint(0, CLASSES, (len(x),))

    def loss() -> Tensor:
        total = x.new_zeros(())
        for output in tree_leaves(_plain(model(x))):
            target = labels.view(-1, *[1] * (output.dim() - 2)).expand(len(x), *output.shape[2:])
            total = total + cross_entropy(output, target)
        return total

    return loss


def _plain(outputs: Any) -> Any:
    """Outputs as lists. Some models return an ordered dict or a named tuple of their heads."""
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    return [part for part in outputs if part is not None] if isinstance(outputs, tuple) else outputs


def _boxes_loss(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    corner = torch.rand(len(x), 3, 2) * 40
    boxes = torch.cat([corner, corner + 20 + torch.rand(len(x), 3, 2) * 30], 2)
    masks = (torch.rand(len(x), 3, *x.shape[2:]) > 0.5).to(torch.uint8)
    targets = [
        {"boxes": box, "labels": torch.randint(1, 5, (3,)), "masks": mask}
        for box, mask in zip(boxes, masks, strict=True)
    ]
    images = list(x.sigmoid())

    def loss() -> Tensor:
        found = model(images, [dict(target) for target in targets])
        return torch.stack(list(found.values())).sum()

    return loss


def _flow(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    other = torch.randn_like(x)

    def loss() -> Tensor:
        flows = model(x, other, num_flow_updates=3)
        return torch.stack([flow.abs().mean() for flow in flows]).sum()

    return loss
