"""Statement kinds whose meaning changes from one training step to the next.

A Session that recognises a step because it looks like an earlier one must notice each of these changes. Every step has
a letter, its *variant*: a program with ``pattern="AABA"`` repeats its first step once, does something else in the third
step, and then repeats the first step again. The rendered code reads the letter from the name ``variant``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fuzz.kind import BEFORE, FORWARD, TRAINED, Kind, changes, values

LETTERS = ("B", "C", "BC", "A", "AC")
"""Variants in which a conditional statement runs."""

ACTIVATIONS = (
    "F.relu",
    "torch.sigmoid",
    "torch.tanh",
    "F.silu",
    "F.gelu",
    "F.softplus",
    "F.leaky_relu",
    "F.hardtanh",
    "F.relu6",
    "F.hardswish",
    "torch.abs",
    "torch.sin",
    "torch.square",
)


def _scalar(name: str, code: str, usual: Sequence[Any], other: Sequence[Any]) -> Kind:
    """A kind whose code has a hole ``{scalar}``, which is another number outside variant A."""
    chosen = '({usual} if variant == "A" else {other})'
    return Kind(
        name, "changing", "{out} = " + code.replace("{scalar}", chosen), FORWARD, {"usual": usual, "other": other}
    )


_ACTIVATION = {"usual": ACTIVATIONS, "other": ACTIVATIONS}

_FUNCTIONS = [
    Kind(
        "activation_by_variant",
        "changing",
        '{out} = ({usual} if variant == "A" else {other})({a})',
        FORWARD,
        _ACTIVATION,
    ),
    Kind(
        "activation_from_step",
        "changing",
        "{out} = ({usual} if step < {step} else {other})({a})",
        FORWARD,
        {**_ACTIVATION, "step": (1, 2, 3, 4)},
    ),
    Kind(
        "layer_by_variant",
        "changing",
        '{out} = (linear if variant == "A" else {other})({a})',
        FORWARD,
        {"other": ("head", "frozen")},
        trains=True,
        strict=True,
        lowers=True,
    ),
    Kind("apply_block", "changing", "{out} = block({a})", trains=True, strict=True, lowers=True),
    *values(
        "changing",
        apply_dropping="dropping({a})",
        apply_leaky="leaky({a})",
        swap_order="sum(function({a}) for function in"
        ' ((torch.tanh, torch.sin) if variant == "A" else (torch.sin, torch.tanh)))',
        with_inplace_relu='F.relu({a} * 1.5, inplace=variant == "A")',
        type_by_variant='{a}.to(torch.float32 if variant == "A" else torch.float64).sin().float()',
        half_by_variant='{a}.to(torch.float32 if variant == "A" else torch.bfloat16).exp().float() * 0.1',
        checkpoint_by_variant="(checkpoint(lambda y: torch.tanh(y).exp(), {a}, use_reentrant=False)"
        ' if variant == "B" else torch.tanh({a}).exp())',
        detach_by_variant='({a} if variant == "A" else {a}.detach()).sin() * {a}',
        layout_by_variant='{a}.contiguous(memory_format=torch.channels_last if variant == "B"'
        " else torch.contiguous_format).tanh()",
        step_scale="{a} * (1 + 0.1 * step)",
        step_leaky="F.leaky_relu({a}, 0.05 * step)",
        step_dropout="F.dropout({a}, 0.1 * step)",
        step_shift="({a} - 0.3 * step).relu()",
    ),
    Kind(
        "repeat_by_variant",
        "changing",
        '{out} = {a}\nfor _ in range(2 if variant == "A" else {times}):\n    {out} = {out}.sin()',
        FORWARD,
        {"times": (1, 3, 4)},
    ),
    Kind("pair_by_variant", "changing", '{out} = {a} * ({a} if variant == "A" else {b})'),
    Kind("twin_by_variant", "changing", '{out} = torch.tanh({a} if variant == "A" else {b})'),
]

_SCALARS = [
    _scalar("dropout_scalar", "F.dropout({a}, {scalar})", (0.3,), (0.0, 0.1, 0.6)),
    _scalar("dropout_training", "F.dropout({a}, 0.3, training={scalar})", (True,), (False,)),
    _scalar("leaky_slope", "F.leaky_relu({a}, {scalar})", (0.1,), (0.01, 0.0, 0.5)),
    _scalar("elu_alpha", "F.elu({a}, {scalar})", (1.0,), (0.5, 2.0)),
    _scalar("softplus_beta", "F.softplus({a}, {scalar})", (1,), (2, 5)),
    _scalar("gelu_approximate", "F.gelu({a}, approximate={scalar})", ('"none"',), ('"tanh"',)),
    _scalar("hardtanh_bound", "F.hardtanh({a}, -0.5, {scalar})", (1.5,), (0.5, 3.0)),
    _scalar("clamp_bound", "{a}.clamp(-1, {scalar})", (1,), (0.5, 2)),
    _scalar("threshold_bound", "F.threshold({a}, {scalar}, 0.0)", (0.25,), (0.0, 0.5)),
    _scalar("norm_eps", "F.layer_norm({a}, {a}.shape[3:], eps={scalar})", (1e-5,), (1e-3, 0.1)),
    _scalar("group_count", "F.group_norm({a}, {scalar})", (2,), (1, 4)),
    _scalar("pool_size", "F.max_pool2d({a}, {scalar}, 1, {scalar} // 2)", (3,), (1, 5)),
    _scalar("mean_size", "F.avg_pool2d({a}, {scalar}, 1, {scalar} // 2)", (3,), (1, 5)),
    _scalar("scale_by_scalar", "{a} * {scalar}", (2,), (0.5, -1)),
    _scalar("shift_by_scalar", "({a} + {scalar}).relu()", (0.0,), (0.5, -0.5)),
    _scalar("power", "({a}.abs() + 0.1) ** {scalar}", (2,), (1, 3, 0.5)),
    _scalar("softmax_axis", "F.softmax({a}, {scalar})", (3,), (1, 2)),
    _scalar("roll_by", "{a}.roll({scalar}, 3).tanh()", (1,), (0, 2)),
    _scalar("part_size", "{a} + {a}[..., : {scalar}].tanh().mean(3, keepdim=True)", (4,), (2, 6)),
    _scalar("part_begin", "{a} + {a}[..., {scalar} :][..., :2].exp().mean(3, keepdim=True)", (0,), (1, 3)),
    _scalar("permuted", "{a}.transpose({scalar}, 3).tanh().transpose({scalar}, 3)", (2,), (1,)),
    _scalar("lerp_weight", "torch.lerp({a}, {a} * {a}, {scalar})", (0.3,), (0.7,)),
    _scalar("seeded_noise", "{a} * torch.rand({a}.shape[{scalar} :])", (1,), (2, 3)),
]

_HOOKS = [
    Kind(
        "hook_in_variant",
        "changing",
        'if variant == "{letter}":\n    {a}.register_hook(lambda g: g * 2)',
        FORWARD,
        {"letter": ("A", "B")},
        tracked=True,
    ),
    Kind(
        "keep_in_variant",
        "changing",
        'if variant == "{letter}":\n    kept.append({a})',
        FORWARD,
        {"letter": ("A", "B")},
    ),
    Kind(
        "change_in_variant",
        "changing",
        'if variant == "{letter}":\n    {a}.data.mul_(0.5)',
        FORWARD,
        {"letter": ("B", "C")},
    ),
    Kind(
        "interrupt_in_variant",
        "changing",
        'if variant == "{letter}":\n    raise Interrupted',
        FORWARD,
        {"letter": ("B", "C")},
    ),
]

_BLOCKS = [
    Kind("in_variant", "changing", 'if variant in "{letters}":', (), {"letters": LETTERS}),
    Kind(
        "grad_by_variant",
        "changing",
        'with torch.set_grad_enabled(variant not in "{letters}"):',
        (),
        {"letters": ("B", "C")},
    ),
    Kind(
        "autocast_by_variant",
        "changing",
        'with torch.autocast("cpu", dtype=torch.bfloat16, enabled=variant in "{letters}"):',
        (),
        {"letters": LETTERS},
    ),
    Kind(
        "settings_by_variant",
        "changing",
        'with Settings(variant in "{letters}"):',
        (),
        {"letters": (*LETTERS, "ABC")},
    ),
]

_BETWEEN_STEPS = [
    *changes(
        "changing",
        BEFORE,
        replace_activation='block[1] = nn.ReLU() if variant == "A" else nn.Sigmoid()',
        replace_inplace='block[1] = nn.ReLU(inplace=variant == "A")',
        replace_linear="if step % 3 == 2:\n    block[0].zero_grad()\n    block[0] = nn.Linear(x.shape[3], x.shape[3])",
        append_module='if variant == "B":\n    block.append(nn.Tanh())',
        change_slope='leaky.negative_slope = 0.1 if variant == "A" else 0.3',
        change_dropping='dropping.p = 0.3 if variant == "A" else 0.6',
        train_dropping='dropping.train(variant == "A")',
        train_norm='norm.train(variant == "A")',
        change_eps='norm.eps = 1e-5 if variant == "A" else 1e-2',
        change_layer_norm_eps='layer_norm.eps = 1e-5 if variant == "A" else 1e-2',
        change_momentum='norm.momentum = 0.1 if variant == "A" else 0.5',
        change_dilation='conv.padding = conv.dilation = (1, 1) if variant == "A" else (2, 2)',
        freeze_leaf='x.requires_grad_(variant == "A")',
        leaf_layout="x.data = x.data.contiguous(memory_format=torch.channels_last"
        ' if variant == "B" else torch.contiguous_format)',
        weight_layout='if variant == "B":\n    linear.weight.data = linear.weight.data.t().contiguous().t()',
        swap_weights="linear.weight, head.weight = head.weight, linear.weight",
        tie_weights="head.weight = linear.weight",
        # The optimizer has to know it: its gradient's graph (create_graph) would keep it alive, and be kept by it.
        new_weight="linear.weight = nn.Parameter(linear.weight.detach() * 0.5)\n"
        'optimizer.add_param_group({"params": [linear.weight]})',
        late_scale_hook="if step == 2:\n    scale.register_hook(lambda g: g * 2)",
    ),
    Kind(
        "freeze_layer",
        "changing",
        '{layer}.requires_grad_(variant != "{letter}")',
        BEFORE,
        {"layer": TRAINED, "letter": ("B", "C")},
    ),
    Kind(
        "freeze_bias",
        "changing",
        '{layer}.bias.requires_grad_(variant != "{letter}")',
        BEFORE,
        {"layer": TRAINED, "letter": ("B", "C")},
    ),
    Kind(
        "late_weight_hook",
        "changing",
        "if step == {step}:\n    {layer}.weight.register_hook(lambda g: g * 2)",
        BEFORE,
        {"layer": TRAINED, "step": (1, 2, 3)},
    ),
    Kind(
        "late_forward_hook",
        "changing",
        "if step == {step}:\n    {layer}.register_forward_hook(lambda module, inputs, output: output * 2)",
        BEFORE,
        {"layer": TRAINED, "step": (1, 2, 3)},
    ),
    Kind(
        "late_forward_prehook",
        "changing",
        "if step == {step}:\n    {layer}.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))",
        BEFORE,
        {"layer": TRAINED, "step": (1, 2, 3)},
    ),
    Kind(
        "late_backward_hook",
        "changing",
        "if step == {step}:\n"
        "    {layer}.register_full_backward_hook(lambda module, inputs, outputs: kept.extend(outputs))",
        BEFORE,
        {"layer": TRAINED, "step": (1, 2, 3)},
    ),
    Kind(
        "forget_what_was_kept",
        "changing",
        'if variant == "{letter}":\n    kept.clear()',
        BEFORE,
        {"letter": ("A", "B")},
    ),
]

CHANGING = (*_FUNCTIONS, *_SCALARS, *_HOOKS, *_BLOCKS, *_BETWEEN_STEPS)
