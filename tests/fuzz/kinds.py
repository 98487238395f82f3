"""Everything that a statement of a program can be. To add a statement kind, add a row here or in ``changing``.

A kind is Python code with holes. ``{out}`` is the name that it assigns, ``{a}`` and ``{b}`` are values, any other hole
is a constant that is drawn from ``choices``. Every value has the shape ``[N, C, H, W]``, so any value fits any hole.

The file is longer than others because it is one table.
"""

from __future__ import annotations

from tests.fuzz.changing import CHANGING
from tests.fuzz.kind import BACKWARD, BETWEEN, FORWARD, SETUP, TRAINED, Kind, changes, hooks, values

FEATURES: dict[str, float] = {
    "unary": 6,
    "layers": 5,
    "binary": 3,
    "inplace": 2,
    "drop": 1.5,
    "outputs": 1,
    "unseen": 2.5,
    "buffers": 1.5,
    "parameters": 1,
    "hooks": 2,
    "changing_hooks": 1,
    "node_hooks": 1,
    "module_hooks": 1,
    "checkpoint": 1,
    "functions": 1.5,
    "autocast": 1,
    "no_grad": 0.7,
    "modes": 0.7,
    "subclass_function": 0.7,
    "subclass_dispatch": 0.7,
    "ducks": 2,
    "anomaly": 0.3,
    "branches": 0.7,
    "held": 1,
    "threads": 0.5,
    "second_order": 0.5,
    "create_graph": 0.7,
    "second_derivatives": 0.7,
    "partial_backward": 1,
    "earlier": 1,
    "changing": 8,
}
"""Groups of kinds, and how often a statement is of one of them."""

COMMON = ("unary", "layers", "binary", "drop")
"""Features of every program. Of the others every program has a few."""

_GIVEN_BY_GENERATOR = [
    Kind("leaf", "base", "{out} = {leaf}.clone()", (), trains=True),
    Kind("data", "base", "{out} = d", (), detaches=True),
    Kind("assign", "base", "{out} = {a}", ()),
    Kind("loss", "base", "{out} = {all}", (), each="{a}.float().clamp(-10, 10).mean()", join=" + "),
    Kind("loss_squares", "base", "{out} = {all}", (), each="{a}.float().square().mean()", join=" + "),
    Kind("loss_stack", "base", "{out} = torch.stack([{all}]).sum()", (), each="{a}.float().sin().mean()"),
    Kind(
        "loss_wrapped",
        "subclass_dispatch",
        "{out} = Wrap.apply({all}, {subclass})",
        (),
        {"subclass": ("Wrapped", "Doubled")},
        each="{a}.float().sin().mean()",
        join=" + ",
    ),
    Kind("drop", "drop", "del {all}", (), each="{a}"),
    Kind("autocast", "autocast", 'with torch.autocast("cpu", dtype=torch.bfloat16):', ()),
    Kind("no_autocast", "autocast", 'with torch.autocast("cpu", enabled=False):', ()),
    Kind("no_grad", "no_grad", "with torch.no_grad():", ()),
    Kind("dispatch_mode", "modes", "with {mode}():", (), {"mode": ("DispatchMode", "DoublingMode")}),
    Kind("function_mode", "modes", "with FunctionMode():", ()),
    Kind("anomaly", "anomaly", "with torch.autograd.set_detect_anomaly(True):", ()),
    Kind("in_step", "branches", "if step == {step}:", (), {"step": (0, 1, 2)}),
    Kind("after_step", "branches", "if step > {step}:", (), {"step": (0, 1)}),
]

_UNARY = [
    *values(
        "unary",
        relu="F.relu({a})",
        relu_inplace="F.relu_({a} * 1.5)",
        leaky_relu="F.leaky_relu({a}, 0.1)",
        hardtanh="F.hardtanh({a}, -0.5, 1.5)",
        clamp="{a}.clamp(-1, 1)",
        abs="{a}.abs()",
        threshold="F.threshold({a}, 0.25, 0.0)",
        tanh="torch.tanh({a})",
        sigmoid="torch.sigmoid({a})",
        exp="torch.exp({a} * 0.1)",
        sin="torch.sin({a})",
        twice="{a} * 2",
        plus_one="{a} + 1",
        square="{a} * {a}",
        dropout="F.dropout({a}, 0.3)",
        gelu="F.gelu({a})",
        silu="F.silu({a})",
        elu="F.elu({a})",
        softplus="F.softplus({a})",
        hardsigmoid="F.hardsigmoid({a})",
        softmax="F.softmax({a}, 3)",
        log_softmax="F.log_softmax({a}, 3)",
        transposed_tanh="{a}.transpose(2, 3).tanh().transpose(2, 3)",
        channels_last="{a}.contiguous(memory_format=torch.channels_last)",
        flat_sin="{a}.flatten(1).sin().view({a}.shape)",
        part_cos="{a}.view(-1)[3:].cos().sum() * 0.1 + {a}",
        gated_mean="({a}.mean(1, keepdim=True).expand_as({a}) * {a}).tanh()",
        flip_square="{a}.flip(2).square()",
        max_pool="F.max_pool2d({a}, 3, 1, 1)",
        avg_pool="F.avg_pool2d({a}, 3, 1, 1)",
        pool_and_grow="F.interpolate(F.max_pool2d({a}, 2), scale_factor=2)",
        avg_pool_and_grow="F.interpolate(F.avg_pool2d({a}, 2), scale_factor=2)",
        reflect='F.pad({a}, (1, 1, 2, 0), mode="reflect")[:, :, : {a}.shape[2], : {a}.shape[3]]',
        gather="{a}.gather(3, {a}.detach().argsort(3))",
        masked_fill="{a}.masked_fill({a} > 1, 0.5)",
        double="{a}.double().exp().clamp(max=5).float()",
        complex="torch.view_as_real(torch.view_as_complex({a}.float().reshape(*{a}.shape[:3], -1, 2)).exp())"
        ".reshape({a}.shape) * 0.1",
        detached_sin="{a}.detach().sin() * {a}",
        unfold="{a}.unfold(3, 3, 1).mean(4).tanh().sum() + {a}",
        index_channels="{a}[:, [0, 1] * ({a}.shape[1] // 2)].tanh()",
        index_pairs="{a}[{a}.detach()[:, :1, 0, 0].argsort(0), torch.arange({a}.shape[1], device={a}.device)[None]]"
        ".tanh()",
    ),
    Kind("bfloat16", "unary", "{out} = {a}.bfloat16().sin().float()", exact=True),
    Kind("to_float", "unary", "{out} = {a}.float()", exact=True),
    Kind("gate", "unary", "gate = {a}.relu() * {a}.sigmoid()\n{out} = ((gate * 2).detach() * {a}).sin()"),
    Kind("gate_rows", "unary", "gate = F.relu({a} * 2).square()\n{out} = ((gate + 1).relu().detach() * {a}).tanh()"),
    Kind("gate_view", "unary", "gate = F.hardtanh({a}).view(-1) * 2\n{out} = {a} * gate.abs().detach().view_as({a})"),
    Kind("halve_channels", "unary", "{out} = {a} * 1.0\n{out}[:, : {a}.shape[1] // 2].mul_(0.5)"),
    Kind("set_item", "unary", "{out} = {a}.clone()\n{out}[..., 1:3] = {a}[..., 2:4].tanh()"),
]

_LAYERS = [
    Kind(
        "apply_linear",
        "layers",
        "{out} = {layer}({a})",
        FORWARD,
        {"layer": ("linear", "head")},
        trains=True,
        strict=True,
        lowers=True,
    ),
    Kind("apply_frozen", "layers", "{out} = frozen({a})", strict=True, lowers=True),
    Kind("apply_conv", "layers", "{out} = conv({a})", trains=True, strict=True, lowers=True),
    Kind("conv_relu", "layers", "{out} = F.relu_(conv({a}))", trains=True, strict=True, lowers=True),
    Kind("apply_norm", "layers", "{out} = norm({a})", trains=True),
    Kind("norm_relu", "layers", "{out} = F.relu_(norm({a}))", trains=True),
    Kind("apply_layer_norm", "layers", "{out} = layer_norm({a})", trains=True),
    Kind("apply_group_norm", "layers", "{out} = group_norm({a})", trains=True),
    Kind("times_scale", "layers", "{out} = {a} * scale", trains=True),
    Kind("tied_linear", "layers", "{out} = F.linear({a}, linear.weight.t())", trains=True, strict=True, lowers=True),
    Kind(
        "cross_entropy",
        "layers",
        "{out} = F.cross_entropy({a}.flatten(2).transpose(1, 2).flatten(0, 1), {a}.detach().argmax(1).flatten()) + {a}",
        strict=True,
    ),
]

_DERIVATIVES = [
    *values(
        "create_graph",
        slope="{a} + derivative({a}, x).reshape(-1)[: {a}.numel()].mean() * 0.1",
        slope_of_relu="F.relu({a}) + derivative(F.relu({a}).square(), x).square().mean() * 0.1",
    ),
    *values(
        "second_derivatives",
        curve="{a} + derivative(derivative({a}.tanh(), x).square(), x).mean() * 0.1",
        curves="{a} * (1 + derivative(derivative(torch.sin({a}), x)[:, 0], x).abs().mean().clamp(max=1))",
    ),
]
_BINARY = [
    *values(
        "binary",
        multiply="{a} * {b}",
        add="{a} + {b}",
        subtract_half="{a} - {b} * 0.5",
        maximum="torch.maximum({a}, {b})",
        divide="{a} / ({b}.abs() + 1)",
        where="torch.where({a} > {b}, {a}.tanh(), {b})",
        addcmul="torch.addcmul({a}, {a}, {b}, value=0.3)",
        similarity="F.cosine_similarity({a}, {b}, dim=1).unsqueeze(1) + {b}",
    ),
    Kind("matmul", "binary", "{out} = torch.matmul({a}.transpose(2, 3), {b}).mean() + {a}", strict=True, lowers=True),
    Kind(
        "attention", "binary", "{out} = F.scaled_dot_product_attention({a}, {b}, {a} * 0.5)", strict=True, lowers=True
    ),
    Kind("lerp", "binary", "{out} = torch.lerp({a}, {b}, 0.3)", strict=True),
]

_INPLACE = changes(
    "inplace",
    BETWEEN,
    halve_="{a}.mul_(0.5)",
    plus_one_="{a}.add_(1)",
    zero_="{a}.zero_()",
    relu_="F.relu_({a})",
    zero_channel_="{a}[:, :1].zero_()",
    tanh_="{a}.tanh_()",
    dropout_="F.dropout({a}, 0.2, inplace=True)",
    leaky_relu_="F.leaky_relu_({a}, 0.2)",
    clamp_="{a}.clamp_(-2, 2)",
    add_value_="{a}.add_({b}, alpha=0.5)",
)

_OUTPUTS = changes(
    "outputs",
    FORWARD,
    chunk="{out} = torch.cat([piece.exp().clamp(max=3) for piece in {a}.chunk(2, 1)], 1)",
    split="{out}_1, {out}_2 = {a}.split(2, 1)\n"
    "{out} = torch.cat([{out}_1.tanh(), {out}_2 * 2], 1)\n"
    "del {out}_1, {out}_2",
    unbind="{out}_1, *{out}_2 = {a}.unbind(1)\n{out} = torch.stack([{out}_1.sin(), *{out}_2], 1)\ndel {out}_1, {out}_2",
    max_values="{out}_1, {out}_2 = {a}.max(3, keepdim=True)\n"
    "{out} = {a} - {out}_1 + {out}_2 * 0.1\n"
    "del {out}_1, {out}_2",
    sort="{out}_1, {out}_2 = {a}.sort(3)\n{out} = {out}_1 * ({out}_2 > 1)\ndel {out}_1, {out}_2",
    cummax="{out} = {a}.cummax(2)[0]",
    topk="{out} = {a} * {a}.topk(2, 3)[0].mean(3, keepdim=True)",
    var_mean="{out}_1, {out}_2 = torch.var_mean({a}, 1, keepdim=True)\n"
    "{out} = ({a} - {out}_2) / ({out}_1 + 1)\n"
    "del {out}_1, {out}_2",
)

_UNSEEN = [
    *changes(
        "unseen",
        BETWEEN,
        data_mul="{a}.data.mul_(0.5)",
        data_double="{a}.data.mul_(2)",
        data_copy="{a}.data.copy_({a}.data.tanh())",
        data_clamp="{a}.data.clamp_max_(1)",
        data_set_item="{a}.data[{a}.data > 1] = 1",
        data_set_one="{a}.data[(-1,) * {a}.dim()] = 1",  # of which there may be no sample
        data_assign="{a}.data = {a}.data * 0.5",
        foreach_mul="torch._foreach_mul_([{a}.data], 2)",
        clamp_out="torch.clamp({a}.data, max=1, out={a}.data)",
        storage_write="torch.empty(0, dtype={a}.dtype).set_({a}.untyped_storage()).mul_(0.5)",
        storage_fill="{a}.untyped_storage()[3] = 0",
        dlpack_mul="torch.from_dlpack({a}.detach().as_subclass(torch.Tensor)).mul_(0.5)",
        detached_mul="{a}.detach().mul_(0.5)",
        unscale="torch._amp_foreach_non_finite_check_and_unscale_([{a}.detach()], torch.zeros(1), torch.tensor(0.5))",
    ),
    Kind("numpy_write", "unseen", "{a}.detach().numpy()[...] *= 0.5", BETWEEN, strict=True),
    Kind("numpy_set_one", "unseen", "{a}.detach().numpy()[(-1,) * {a}.dim()] = 1", BETWEEN, strict=True),
    Kind("numpy_clamp", "unseen", "{a}.detach().numpy().clip(max=1, out={a}.detach().numpy())", BETWEEN, strict=True),
]

_BUFFERS = [
    *values(
        "buffers",
        centre="{a} - statistics.mean",
        stretch="{a} / (statistics.factor + 1)",
        move="torch.add({a}, statistics.mean, alpha=2)",
        centre_in_module="statistics({a})",
    ),
    *changes(
        "buffers",
        BETWEEN,
        update_mean="statistics.mean.mul_(0.9).add_({a}.detach().float().mean((0, 2, 3)).view(-1, 1, 1), alpha=0.1)",
        update_mean_data="statistics.mean.data.lerp_({a}.detach().float().mean((0, 2, 3)).view(-1, 1, 1), 0.1)",
        update_factor="statistics.factor.data.mul_(0.9).add_({a}.detach().float().abs().mean(), alpha=0.1)",
        halve_factor="statistics.factor.mul_(0.5)",
        update_statistics="{out}_1 = statistics.mean.view(-1)\n"
        "torch.batch_norm_update_stats({a}.detach().float(), {out}_1, {out}_1.clone(), 0.1)\n"
        "del {out}_1",
        step_mean="torch._fused_sgd_([statistics.mean], [statistics.mean.cos()], [], weight_decay=0.0, momentum=0.0, "
        "lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=True)",
    ),
]

_PARAMETERS = [
    Kind("parameter_data_mul", "parameters", "{layer}.weight.data.mul_(0.5)", BETWEEN, {"layer": TRAINED}),
    Kind(
        "parameter_mul",
        "parameters",
        "with torch.no_grad():\n    {layer}.weight.mul_(0.5)",
        BETWEEN,
        {"layer": TRAINED},
    ),
    Kind("bias_add", "parameters", "with torch.no_grad():\n    {layer}.bias.add_(0.5)", BETWEEN, {"layer": TRAINED}),
    Kind("scale_data_mul", "parameters", "scale.data.mul_(0.5)", BETWEEN),
    Kind("leaf_data_mul", "parameters", "x.data.mul_(0.5)", BETWEEN),
    Kind("leaf_mul", "parameters", "with torch.no_grad():\n    x.mul_(0.5)", BETWEEN),
    Kind(
        "freeze_by_turns",
        "parameters",
        "{layer}.weight.requires_grad_(step % 2 == {turn})",
        FORWARD,
        {"layer": TRAINED, "turn": (0, 1)},
    ),
    Kind("running_mean_mul", "parameters", "norm.running_mean.mul_(0.5)", BETWEEN),
]

_HOOKS = [
    *hooks(
        "hooks",
        keep_gradient="{a}.register_hook(kept.append)",
        keep_storage="{a}.register_hook(lambda g: kept.append(g.untyped_storage()))",
        keep_array="{a}.register_hook(lambda g: kept.append(g.detach().float().numpy()))",
        keep_view="{a}.register_hook(lambda g: kept.append(g.view(-1)))",
        keep_detached="{a}.register_hook(lambda g: kept.append(g.detach()))",
        keep_data="{a}.register_hook(lambda g: kept.append(g.data))",
        retain_gradient="{a}.retain_grad()\nkept.append({a})",
    ),
    *hooks(
        "changing_hooks",
        double_gradient="{a}.register_hook(lambda g: g * 2)",
        new_gradient="{a}.register_hook(lambda g: torch.ones_like(g) * 0.01)",
        change_gradient="{a}.register_hook(lambda g: g.mul_(2))",
        change_gradient_data="{a}.register_hook(lambda g: g.data.mul_(2))",
        keep_and_double="{a}.register_hook(lambda g: kept.append(g) or g * 2)",
    ),
    *hooks(
        "node_hooks",
        node_hook="{a}.grad_fn.register_hook(lambda inputs, outputs: kept.extend(inputs))",
        node_hook_outputs="{a}.grad_fn.register_hook(lambda inputs, outputs: kept.extend(outputs))",
        node_prehook="{a}.grad_fn.register_prehook(lambda outputs: kept.extend(outputs))",
        node_prehook_double="{a}.grad_fn.register_prehook(doubled)",
        node_hook_double="{a}.grad_fn.register_hook(lambda inputs, outputs: doubled(inputs))",
        node_hook_storages="{a}.grad_fn.register_hook(lambda inputs, outputs: kept.extend(storages(inputs)))",
    ),
    Kind(
        "accumulate_prehook",
        "node_hooks",
        "accumulating_node({layer}.weight).register_prehook(lambda g: kept.extend(g))",
        SETUP,
        {"layer": TRAINED},
    ),
    Kind(
        "accumulate_storage",
        "node_hooks",
        "accumulates.append(accumulating_node({layer}.weight))\n"
        "accumulates[-1].register_prehook(lambda g: kept.append(g[0].untyped_storage()))",
        SETUP,
        {"layer": TRAINED},
    ),
    Kind(
        "post_accumulate",
        "node_hooks",
        "{layer}.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))",
        SETUP,
        {"layer": TRAINED},
    ),
    Kind(
        "post_accumulate_free",
        "node_hooks",
        "{layer}.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.mul_(0.5)))",
        SETUP,
        {"layer": TRAINED},
    ),
    Kind(
        "parameter_hook",
        "hooks",
        "{layer}.weight.register_hook(lambda g: kept.append(g.untyped_storage()))",
        SETUP,
        {"layer": TRAINED},
    ),
    Kind(
        "forward_hook",
        "module_hooks",
        "{layer}.register_forward_hook(lambda module, inputs, output: output * 2)",
        SETUP,
        {"layer": TRAINED},
    ),
    Kind(
        "forward_hook_keeps",
        "module_hooks",
        "{layer}.register_forward_hook(lambda module, inputs, output: kept.append(output.detach()))",
        SETUP,
        {"layer": TRAINED},
    ),
    Kind(
        "forward_prehook",
        "module_hooks",
        "{layer}.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))",
        SETUP,
        {"layer": TRAINED},
    ),
    Kind(
        "backward_hook",
        "module_hooks",
        "{layer}.register_full_backward_hook(lambda module, inputs, outputs: kept.extend(outputs))",
        SETUP,
        {"layer": TRAINED},
    ),
    Kind(
        "backward_hook_double",
        "module_hooks",
        "{layer}.register_full_backward_hook(lambda module, inputs, outputs: doubled(inputs))",
        SETUP,
        {"layer": TRAINED},
    ),
    Kind(
        "backward_prehook",
        "module_hooks",
        "{layer}.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))",
        SETUP,
        {"layer": TRAINED},
    ),
]

_REGIONS = [
    *values(
        "checkpoint",
        checkpoint="checkpoint(lambda y: torch.tanh(y).exp(), {a}, use_reentrant=False)",
        checkpoint_reentrant="checkpoint(lambda y: torch.relu(y * 2).sin(), {a}, use_reentrant=True)",
        checkpoint_dropout="checkpoint(lambda y: F.dropout(torch.tanh(y), 0.3).exp(), {a}, use_reentrant=False)",
    ),
    Kind(
        "checkpoint_layer",
        "checkpoint",
        "{out} = checkpoint(lambda y: F.gelu(linear(y)), {a}, use_reentrant={reentrant})",
        FORWARD,
        {"reentrant": (True, False)},
        trains=True,
        strict=True,
        lowers=True,
    ),
    *values(
        "functions",
        cube="Cube.apply({a}.tanh())",
        overwrites="Overwrites.apply({a})",
        overwrites_tanh="Overwrites.apply({a}.tanh())",
        keeps_gradient="KeepsGradient.apply({a}, kept)",
    ),
    Kind("from_numpy", "functions", "{out} = FromNumpy.apply({a}, kept)", strict=True),
    *values("subclass_function", counting="{a}.as_subclass(Counting)", not_counting="{a}.as_subclass(torch.Tensor)"),
    *changes(
        "held",
        FORWARD,
        hold="kept.append({a})",
        hold_detached="kept.append({a}.detach())",
        hold_copy="kept.append({a}.detach().clone())",
        hold_data="kept.append({a}.data)",
        hold_storage="kept.append({a}.untyped_storage())",
    ),
    Kind("detach", "no_grad", "{out} = {a}.detach()", detaches=True),
]

_BOX = {"box": ("Box", "HalfBox", "QuietBox")}

_DUCKS = [
    *(
        Kind(name, "ducks", "{out} = " + code, choices=_BOX)
        for name, code in {
            "gelu_of_duck": "F.gelu({box}({a}))",
            "softmax_of_duck": "F.softmax({box}({a}), dim=3)",
            "dropout_of_duck": "F.dropout({box}({a} * 1.5), 0.3)",
            "multiply_duck": "torch.mul({a}, {box}({b}))",
            "add_duck": "torch.add({a}, other={box}({b}), alpha=0.5)",
            "where_duck": "torch.where({a} > 0, {box}({b}), {a})",
            "cat_duck": "torch.cat([{a}, {box}({b})], 3)[..., : {a}.shape[3]].tanh()",
            "stack_duck": "torch.stack(({box}({a}), {b})).sin().sum(0)",
            "mapped_by_list": "{a}[:, list(range({a}.shape[1] - 1, -1, -1))].tanh()",
            "hardswish_of_duck": "torch.sigmoid(F.hardswish({box}({a})))",
        }.items()
    ),
    Kind("relu_duck_", "ducks", "torch.relu_({box}({a}))", BETWEEN, {"box": ("Box", "QuietBox")}),
    Kind("counting_mul_", "ducks", "{a}.detach().as_subclass(Counting).mul_(0.5)", BETWEEN),
    # Without a new version, which nobody sees once the Session is left.
    Kind("wrapped_mul_", "ducks", "Wrapped({a}.detach().as_subclass(torch.Tensor)).mul_(0.5)"),
]

_BACKWARD = [
    Kind("backward", "base", "{a}.backward(retain_graph={retain})", (), {"retain": (False, True)}),
    Kind(
        "backward_in_thread",
        "threads",
        "in_thread(lambda: {a}.backward(retain_graph={retain}))",
        BACKWARD,
        {"retain": (False, True)},
    ),
    Kind(
        "backward_to_leaf",
        "partial_backward",
        "{a}.backward(retain_graph={retain}, inputs=[x])",
        BACKWARD,
        {"retain": (False, True)},
    ),
    Kind(
        "backward_to_layer",
        "partial_backward",
        "{a}.backward(retain_graph={retain}, inputs=[{layer}.weight])",
        BACKWARD,
        {"retain": (False, True), "layer": TRAINED},
    ),
    Kind(
        "gradient_of_value",
        "partial_backward",
        "kept.extend(torch.autograd.grad({a}, [{b}], retain_graph={retain}, allow_unused=True))",
        BACKWARD,
        {"retain": (False, True)},
    ),
    Kind(
        "gradient_of_leaf",
        "partial_backward",
        "kept.extend(torch.autograd.grad({a}, [x], retain_graph={retain}, allow_unused=True))",
        BACKWARD,
        {"retain": (False, True)},
    ),
    Kind("keep_graph", "earlier", "earlier.append({a})", BACKWARD),
    Kind(
        "earlier_backward",
        "earlier",
        "(earlier.pop() if earlier else {a}).backward(retain_graph={retain})",
        BACKWARD,
        {"retain": (False, True)},
    ),
    Kind(
        "double_backward",
        "second_order",
        "torch.autograd.grad({a}, [x], create_graph=True)[0].square().sum().backward()",
        BACKWARD,
    ),
    Kind(
        "penalty_of_parameters",
        "create_graph",
        "({a} + sum(g.square().mean() for g in torch.autograd.grad({a}, [x, {layer}.weight], create_graph=True,"
        " allow_unused=True) if g is not None)).backward(retain_graph={retain})",
        BACKWARD,
        {"retain": (False, True), "layer": TRAINED},
    ),
    Kind(
        "hessian_product",
        "create_graph",
        "kept.extend(hessian_product({a}, x, {retain}))",
        BACKWARD,
        {"retain": (False, True)},
    ),
    Kind(
        "update_inside",
        "create_graph",
        "updated_loss({a}, x, {layer}).backward(retain_graph={retain})",
        BACKWARD,
        {"retain": (False, True), "layer": ("linear", "conv")},
    ),
    Kind(
        "third_derivative",
        "second_derivatives",
        "(derivative(derivative(derivative({a}, x).sin(), x), x).square().sum() * 1e-3 + {a})"
        ".backward(retain_graph={retain})",
        BACKWARD,
        {"retain": (False, True)},
    ),
    Kind(
        "backward_create_graph",
        "second_order",
        "{a}.backward(retain_graph={retain}, create_graph=True)",
        BACKWARD,
        {"retain": (True,)},
    ),
]

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *_GIVEN_BY_GENERATOR,
        *_UNARY,
        *_DERIVATIVES,
        *_LAYERS,
        *_BINARY,
        *_INPLACE,
        *_OUTPUTS,
        *_UNSEEN,
        *_BUFFERS,
        *_PARAMETERS,
        *_HOOKS,
        *_REGIONS,
        *_DUCKS,
        *_BACKWARD,
        *CHANGING,
    )
}
