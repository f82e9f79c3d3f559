"""Models of torchvision and timm with tiny configurations: a batch of three images, and what they compute of it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def _torchvision(build: Callable[[Any], nn.Module], size: int = 32, key: str | None = None) -> Any:
    def make() -> tuple[nn.Module, int, str | None]:
        import torchvision

        return build(torchvision.models), size, key

    return make


def _timm(name: str, size: int = 32, kind: str | None = None, **fields: Any) -> Any:
    """A registered model; or, where the registered ones cannot be made smaller, the class ``kind`` of module ``name``.

    Fields of such a class may be names of classes in its module.
    """

    def make() -> tuple[nn.Module, int, str | None]:
        import timm

        if kind is None:
            return timm.create_model(name, num_classes=5, **fields), size, None
        module = importlib.import_module(f"timm.models.{name}")

        def named(field: Any) -> Any:
            if isinstance(field, tuple):
                return tuple(map(named, field))
            return getattr(module, field) if isinstance(field, str) else field

        return getattr(module, kind)(num_classes=5, **{k: named(v) for k, v in fields.items()}), size, None

    return make


_mixer = functools.partial(_timm, "mlp_mixer", kind="MlpMixer", img_size=32, embed_dim=16, num_blocks=2)


def _vgg(models: Any) -> nn.Module:
    model = models.VGG(models.vgg.make_layers([4, "M", 8, "M", 8, "M"], batch_norm=True), num_classes=5)
    model.classifier = nn.Linear(8 * 7 * 7, 5)  # for the 120 million parameters of its own
    return model


_FAMILIES: dict[str, Callable[[], tuple[nn.Module, int, str | None]]] = {
    "torchvision AlexNet": _torchvision(lambda m: m.AlexNet(num_classes=5, dropout=0.0), 64),
    "torchvision VGG": _torchvision(_vgg),
    "torchvision ResNet": _torchvision(lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)),
    "torchvision ResNeXt": _torchvision(
        lambda m: m.ResNet(m.resnet.Bottleneck, [1, 1, 1, 1], num_classes=5, groups=2, width_per_group=4)
    ),
    "torchvision DenseNet": _torchvision(lambda m: m.DenseNet(4, (2, 2), 8, num_classes=5)),
    "torchvision SqueezeNet": _torchvision(lambda m: m.SqueezeNet("1_1", num_classes=5, dropout=0.0), 48),
    "torchvision GoogLeNet": _torchvision(
        lambda m: m.GoogLeNet(5, aux_logits=False, init_weights=False, dropout=0.0), 64
    ),
    "torchvision Inception": _torchvision(
        lambda m: m.Inception3(5, aux_logits=False, init_weights=False, dropout=0.0), 80
    ),
    "torchvision MobileNetV2": _torchvision(lambda m: m.MobileNetV2(5, width_mult=0.1, dropout=0.0)),
    "torchvision MobileNetV3": _torchvision(lambda m: m.mobilenet_v3_small(num_classes=5, dropout=0.0)),
    "torchvision MNASNet": _torchvision(lambda m: m.MNASNet(0.1, 5, dropout=0.0)),
    "torchvision ShuffleNetV2": _torchvision(lambda m: m.ShuffleNetV2([2, 2, 2], [4, 8, 8, 8, 16], 5)),
    "torchvision EfficientNet": _torchvision(
        lambda m: m.EfficientNet([m.efficientnet.MBConvConfig(2, 3, 2, 8, 8, 1)], 0.0, 0.0, num_classes=5)
    ),
    "torchvision RegNet": _torchvision(
        lambda m: m.RegNet(m.regnet.BlockParams([1, 1], [8, 16], [4, 4], [1.0, 1.0], [2, 2], 0.25), 5)
    ),
    "torchvision ConvNeXt": _torchvision(
        lambda m: m.ConvNeXt([m.convnext.CNBlockConfig(8, 16, 1), m.convnext.CNBlockConfig(16, None, 1)], num_classes=5)
    ),
    "torchvision ViT": _torchvision(lambda m: m.VisionTransformer(32, 8, 2, 2, 16, 24, num_classes=5)),
    "torchvision Swin": _torchvision(
        lambda m: m.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=5)
    ),
    "torchvision Swin V2": _torchvision(
        lambda m: m.SwinTransformer(
            *([4, 4], 8, [2, 2], [2, 2], [2, 2]),
            stochastic_depth_prob=0.0,
            num_classes=5,
            block=m.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=m.swin_transformer.PatchMergingV2,
        )
    ),
    "torchvision MaxViT": _torchvision(
        lambda m: m.MaxVit((32, 32), 8, 4, [8, 8], [1, 1], 4, stochastic_depth_prob=0.0, num_classes=5)
    ),
    "torchvision FCN": _torchvision(
        lambda m: m.segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=5), 32, "out"
    ),
    "torchvision LRASPP": _torchvision(
        lambda m: m.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5),
        *(32, "out"),
    ),
    "timm ViT": _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2),
    "timm DeiT": _timm("deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2),
    "timm BEiT": _timm("beit_base_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2),
    "timm EVA": _timm("eva02_tiny_patch14_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2),
    "timm CaiT": _timm("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2),
    "timm XCiT": _timm("xcit_nano_12_p16_224", img_size=32, embed_dim=24, depth=2, num_heads=2),
    "timm Swin": _timm(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(1, 2)
    ),
    "timm PiT": _timm("pit_ti_224", 64, img_size=64, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(1, 2, 4)),
    "timm LeViT": _timm(
        "levit_128s", 64, img_size=64, embed_dim=(16, 24, 32), depth=(1, 1, 1), num_heads=(1, 2, 2), key_dim=8
    ),
    "timm Twins": _timm("twins_svt_small", 64, img_size=64, embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1)),
    "timm VOLO": _timm(
        "volo",
        64,
        kind="VOLO",
        img_size=64,
        stem_hidden_dim=8,
        layers=(1, 1, 1, 1),
        embed_dims=(8, 16, 16, 16),
        num_heads=(1, 2, 2, 2),
    ),
    "timm CoaT": _timm("coat_lite_tiny", 64, img_size=64, embed_dims=(16, 16, 16, 16), serial_depths=(1, 1, 1, 1)),
    "timm MobileViT": _timm("mobilevit_xxs", 64),
    "timm EdgeNeXt": _timm("edgenext_xx_small", 64, dims=(8, 16, 16, 16), depths=(1, 1, 1, 1), heads=(2, 2, 2, 2)),
    "timm ConvNeXt": _timm("convnext_atto", dims=(8, 8, 16, 16), depths=(1, 1, 1, 1)),
    "timm Mixer": _mixer(),
    "timm gMLP": _mixer(mlp_ratio=6, block_layer="SpatialGatingBlock", mlp_layer="GatedMlp"),
    "timm ResMLP": _mixer(mlp_ratio=4, block_layer="ResBlock", norm_layer="Affine"),
    "timm ResNet-T": _timm("resnet10t", channels=(8, 8, 16, 16), stem_width=8),
    "timm ResNeSt": _timm("resnest14d", 64, stem_width=8, channels=(8, 8, 16, 16)),
    "timm Res2Net": _timm("res2net50_14w_8s", 32, layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)),
    "timm SEResNet": _timm("seresnet18", channels=(8, 8, 16, 16)),
    "timm NF-ResNet": _timm("nf_resnet26", depths=(1, 1, 1, 1), channels=(8, 8, 16, 16)),
    "timm NFNet": _timm("nfnet_l0", 64, depths=(1, 1, 1, 1), channels=(16, 16, 16, 16), group_size=8),
    "timm RepVGG": _timm("repvgg_a0", 64),
    "timm GhostNet": _timm("ghostnet_050", 64),
    "timm MobileNetV4": _timm("mobilenetv4_conv_small_035", 64),
    "timm EfficientNet": _timm("efficientnet_lite0", 64),
    "timm HRNet": _timm("hrnet_w18_small", 64),
    "timm DLA": _timm("dla46_c", 64, levels=(1, 1, 1, 1, 1, 1), channels=(8, 8, 16, 16, 16, 16)),
    "timm DenseNet": _timm("densenet121", 64, growth_rate=4, block_config=(2, 2)),
    "timm ConvMixer": _timm("convmixer", 64, kind="ConvMixer", dim=16, depth=2),
    "timm PoolFormer": _timm(
        "metaformer",
        64,
        kind="MetaFormer",
        depths=(1, 1, 1, 1),
        dims=(8, 8, 16, 16),
        mlp_act=nn.GELU,
        mlp_bias=True,
        layer_scale_init_values=0.1,
        res_scale_init_values=None,
        use_mlp_head=False,
    ),
    "timm CAFormer": _timm(
        "metaformer",
        64,
        kind="MetaFormer",
        depths=(1, 1, 1, 1),
        dims=(8, 8, 32, 32),
        token_mixers=("SepConv", "SepConv", "Attention", "Attention"),
        norm_layers=("LayerNorm2dNoBias",) * 2 + ("LayerNormNoBias",) * 2,
    ),
    "timm FocalNet": _timm("focalnet", 64, kind="FocalNet", depths=(1, 1, 1, 1), embed_dim=8, drop_path_rate=0.0),
    "timm DaViT": _timm("davit_tiny", 64, depths=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2)),
    "timm FastViT": _timm("fastvit_t8", 64, layers=(1, 1, 1, 1), embed_dims=(8, 8, 16, 16)),
    "timm InceptionNeXt": _timm("inception_next_atto", 64, depths=(1, 1, 1, 1), dims=(32, 32, 32, 32)),
    "timm Sequencer": _timm(
        "sequencer2d_s", 64, layers=(1, 1, 1, 1), embed_dims=(8, 16, 16, 16), hidden_sizes=(4, 8, 8, 8)
    ),
    "timm CrossViT": _timm("crossvit_9_240", 240, embed_dim=(8, 16), depth=((1, 1, 0), (1, 1, 0)), num_heads=(2, 2)),
    "timm MaxViT": _timm(
        "maxvit_rmlp_pico_rw_256", 64, img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 32, 32), stem_width=(8, 16)
    ),
    "timm MambaOut": _timm("mambaout_femto", 64, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "timm StarNet": _timm("starnet_s1", 64, base_dim=8, depths=(1, 1, 1, 1)),
}
FAMILIES = tuple(_FAMILIES)


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor], Callable[..., torch.Tensor]]:
    """A model in evaluation mode, a batch of three, and ``apply(model, images) -> [3, ...]``."""
    torch.manual_seed(0)
    model, size, key = _FAMILIES[name]()
    apply = (lambda model, x: model(x)) if key is None else (lambda model, x: model(x)[key].flatten(2).mean(-1))
    return model.eval(), (torch.randn(3, 3, size, size),), apply
