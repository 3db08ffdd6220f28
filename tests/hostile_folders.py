"""Model folders made to run code, to hang, to fill memory or to pass for whole: one small function of a good folder
each.

JUDGED are refused from names, sizes, JSON and headers alone; LOADED only when the weights meet the model.
Code that runs leaves the file `ran` beside the folder.
"""

from __future__ import annotations

import os
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import folder_damage as damage
from folder_damage import INDEX, WEIGHTS, Damage, change, name_component, put

CONFIGS = (
    "transformer/config.json", "vae/config.json", "text_encoder/config.json", "scheduler/scheduler_config.json",
    "tokenizer/tokenizer_config.json",
)  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000


def _judged() -> dict[str, Damage]:
    found: dict[str, Damage] = {}
    for name in (
        "None.py", "pipeline.py", "WanPipeline.py", "x/y/z.py", "vae/evilmod.py", "vae/modeling.PY", "scheduler/scheduler.pyc",
        "text_encoder/native.so", "tokenizer/native.pyd", "vae/__pycache__/vae.txt", "transformer/code.py.txt", "custom_generate/generate.py",
        "transformer/lib.so.1", "vae/wheel.whl",
    ):  # fmt: skip
        found[f"code {name}"] = partial(damage.put_code, name=name)
    for suffix in ("bin", "pt", "pth", "ckpt", "pkl", "pickle", "npy", "npz", "h5", "msgpack", "joblib", "BIN"):
        found[f"pickle .{suffix} in vae"] = partial(damage.put_pickle, name=f"vae/diffusion_pytorch_model.{suffix}")
    found["pickle alone"] = damage.only_pickle
    for part, entry, code in (
        ("vae", ["evilmod", "X"], "vae/evilmod.py"), ("scheduler", ["evilmod", "X"], "scheduler/evilmod.py"),
        ("tokenizer", ["evilmod", "X"], "evilmod.py"), ("transformer", ["evilmod", "X"], "transformer/evilmod.py"),
    ):  # fmt: skip
        found[f"{part} from a module in the folder"] = partial(name_component, part=part, entry=entry, code=code)
    for entry in (
        ["os", "system"], ["builtins", "eval"], ["subprocess", "Popen"], ["antigravity", "fly"], ["diffusers.utils", "logging"],
        ["diffusers", "DiffusionPipeline"], ["diffusers", "OnnxRuntimeModel"], ["onnxruntime.training", "ORTModule"],
        ["diffusers", "AutoModel"], ["diffusers", "UNet2DConditionModel"], ["transformers", "T5EncoderModel"], ["diffusers", "__class__"],
        ["diffusers", "AutoencoderKLWan.__init__"], ["diffusers", "AutoencoderKLWan\n"], ["", ""], [None, "X"], ["diffusers", None],
        ["diffusers"], ["diffusers", "AutoencoderKLWan", "x"], [1, 2], "AutoencoderKLWan", {}, {"a": 1}, None, [None, None], [],
        [["diffusers"], ["AutoencoderKLWan"]],
    ):  # fmt: skip
        found[f"vae is {entry!r}"] = partial(name_component, part="vae", entry=entry)
    for part, package, cls in (
        ("text_encoder", "transformers", "pipeline"), ("text_encoder", "transformers", "AutoModel"), ("text_encoder", "transformers", "Trainer"),
        ("text_encoder", "diffusers", "UMT5EncoderModel"), ("tokenizer", "transformers", "AutoConfig"),
        ("tokenizer", "transformers", "UMT5EncoderModel"),
    ):  # fmt: skip
        found[f"{part} is {package} {cls}"] = partial(name_component, part=part, entry=[package, cls])
    for name in ("__init__", "../vae", "evil", "vae_22", "unet", "tokenizer/../vae"):
        found[f"component {name}"] = partial(name_component, part=name, entry=["diffusers", "AutoencoderKLWan"])
    found["a string as a setting"] = partial(change, name=INDEX, boundary_ratio="half")
    for value in (
        ["None", "X"], ["pipeline", "WanPipeline"], None, 5, "DiffusionPipeline", "StableDiffusionPipeline", "os.system", "../x",
    ):  # fmt: skip
        found[f"_class_name {value!r}"] = partial(change, name=INDEX, _class_name=value)
    for label, text in {
        "empty": "", "list": "[]", "null": "null", "number": "5", "cut": '{"a"', "NaN": '{"a": NaN}', "deep": DEEP, "twice": '{"a":1,"a":2}',
        "binary": b"\xff\xfe\x00", "utf-16": "{}".encode("utf-16"), "BOM": b"\xef\xbb\xbf{}", "digits": '{"a":' + "9" * 5000 + "}",
        "9 MB": '{"a":"' + "x" * 9_000_000 + '"}',
    }.items():  # fmt: skip
        found[f"{INDEX} {label}"] = partial(put, name=INDEX, content=text)
    for name in CONFIGS:
        found[f"{name} a list"] = partial(put, name=name, content="[1]")
        found[f"{name} cut"] = partial(put, name=name, content='{"a"')
        found[f"{name} auto_map"] = partial(
            change, name=name, auto_map={"AutoModel": "evil.X", "AutoTokenizer": ["evil.X", None]}
        )
    found["auto_map inside"] = partial(
        change, name="text_encoder/config.json", text_config={"x": [{"auto_map": {"AutoConfig": "e.X"}}]}
    )
    found["quantised"] = partial(
        change, name="transformer/config.json", quantization_config={"quant_method": "torchao"}
    )
    found["attention from a hub"] = partial(
        change, name="text_encoder/config.json", _attn_implementation="evil/kernels"
    )
    found["another class"] = partial(change, name="vae/config.json", _class_name="AutoencoderKLMochi")
    found["adapter"] = partial(
        put, name="text_encoder/adapter_config.json", content='{"base_model_name_or_path": "evil/model"}'
    )
    found["modular"] = partial(put, name="modular_model_index.json", content="{}")
    for key, value in (
        ("vocab_file", "/etc/passwd"), ("tokenizer_file", "../x.json"), ("init_inputs", ["/etc/passwd"]), ("gguf_file", "x"),
        ("vocab", "/etc/passwd"), ("vocab", "/dev/zero"), ("vocab", "vocab.json"), ("merges", "/etc/passwd"), ("merges", "../merges.txt"),
        ("anything", "/etc/passwd"), ("anything", ["a", "../../x"]), ("anything", {"a": {"b": "~/x"}}), ("anything", "file:///etc/passwd"),
    ):  # fmt: skip
        found[f"tokenizer's {key} {value}"] = partial(change, name="tokenizer/tokenizer_config.json", **{key: value})
    for name, key, number in (
        ("transformer/config.json", "num_layers", 10**9), ("transformer/config.json", "rope_max_seq_len", 10**12),
        ("transformer/config.json", "ffn_dim", 1e30), ("vae/config.json", "dim_mult", [10**9] * 4),
        ("text_encoder/config.json", "vocab_size", 10**12), ("scheduler/scheduler_config.json", "num_train_timesteps", 10**10),
    ):  # fmt: skip
        found[f"{key} {number}"] = partial(change, name=name, **{key: number})
    # tables of positions and layers that are filled before any weight is compared
    for name, changes in (
        ("transformer/config.json", {"attention_head_dim": 262_144}), ("transformer/config.json", {"attention_head_dim": 2**20}),
        ("transformer/config.json", {"rope_max_seq_len": 2**20}), ("vae/config.json", {"z_dim": 2**20}), ("vae/config.json", {"base_dim": 2**18}),
        ("transformer/config.json", {"sample_width": 2**19, "sample_height": 2**19, "sample_frames": 9}),
        ("text_encoder/config.json", {"d_kv": 2**20}),
    ):  # fmt: skip
        found[f"{name} {changes}"] = partial(change, name=name, **changes)
    for name, rules in {
        "nine that lengthen": [damage.replaces("a", "a" * 100)] * 9, "thirty that separate": [damage.replaces("x*", "ab", "Regex")] * 30,
        "of another dialect": [damage.replaces("(?~x)", "abc", "Regex")] * 9, "a thousand": [damage.replaces("a", "b")] * 1000,
        "one long": [damage.replaces("a", "b" * 10**6)], "a long pattern": [damage.replaces("(a|b)" * 10**4, "b", "Regex")],
        "nested": [{"type": "Sequence", "normalizers": [damage.replaces("a", "a" * 100)] * 3}] * 3,
        "that prepend": [{"type": "Prepend", "prepend": "x" * 100}] * 9,
    }.items():  # fmt: skip
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            found[f"{part} rules: {name}"] = partial(damage.set_rules, part=part, rules=rules)
    for name in (INDEX, WEIGHTS["vae"], "vae/config.json", "tokenizer/tokenizer.json", "pipe", "vae/pipe"):
        found[f"FIFO {name}"] = partial(damage.replace_by_fifo, name=name)
    found["socket"] = partial(damage.put_socket, name="vae/s")
    for name, target in (
        ("vae/config.json", "/etc/passwd"), ("README.md", "/etc/passwd"), (INDEX, "../outside.json"), (WEIGHTS["vae"], "/dev/zero"),
        ("x.txt", "/dev/stdin"), ("x.txt", "nowhere"), ("x.txt", "x.txt"), ("vae/up", ".."), ("vae", "../outside"), ("loop", "."),
    ):  # fmt: skip
        found[f"link {name} to {target}"] = partial(damage.link, name=name, target=target)
    found["weights behind a link that leaves"] = partial(damage.move_out, name=WEIGHTS["transformer"])
    found["link to a FIFO"] = partial(damage.link_to_fifo, name="vae/config.json")
    found["long name"] = partial(put, name="vae/" + "n" * 240, content="")
    found["line end in a name"] = partial(put, name="vae/a\nmodel: all is well", content="")
    found["escape in a name"] = partial(put, name="vae/\x1b[2Ja.json", content="")
    found["name that is no text"] = lambda f: Path(os.fsdecode(os.fsencode(f) + b"/vae/\xff\xfe.json")).touch()
    found["many files"], found["deep folders"] = damage.many_files, partial(damage.nest, depth=40)
    configs = ("scheduler/scheduler_config.json", INDEX, "transformer/config.json")
    for part in ("vae", "tokenizer", *configs, *WEIGHTS.values()):
        found[f"without {part}"] = partial(damage.drop, name=part)
    found["a variant alone"] = lambda f: (
        (f / WEIGHTS["vae"]).rename(f / "vae/diffusion_pytorch_model.fp16.safetensors"),
        None,
    )[1]
    found["weights of a tokenizer"] = partial(put, name="tokenizer/model.safetensors", content="x")
    return found | _headers() | _shards()


def _headers() -> dict[str, Damage]:
    path = WEIGHTS["transformer"]
    found: dict[str, Damage] = {
        "weights empty": partial(put, name=path, content=b""),
        "weights 7 bytes": partial(put, name=path, content=b"1234567"),
        "weights cut": lambda f: os.truncate(f / path, 10_000),
        "weights with a tail": lambda f: put(f, path, (f / path).read_bytes() + b"x"),
        "header past the end": partial(damage.raw_header, text=b"{}", length=2**40),
        "header length 2**64-1": partial(damage.raw_header, text=b"{}", length=2**64 - 1),
        "header too long": partial(damage.raw_header, text=b"{" + b" " * 17_000_000 + b"}"),
        "header deep": partial(damage.raw_header, text=DEEP.encode()),
        "header a pickle": lambda f: damage.raw_header(f, pickle.dumps(damage.Marker(damage.ran(f)))),
        "header names twice": partial(damage.edit_header, edit=damage.twice),
        "header tensors overlap": partial(
            damage.edit_header, edit=lambda h: [e.update(data_offsets=[0, 8], shape=[2]) for e in h.values()] and None
        ),
        "header metadata a list": partial(damage.edit_header, edit=lambda h: h.update(__metadata__=[1])),
        "header of another framework": partial(
            damage.edit_header, edit=lambda h: h.update(__metadata__={"format": "tf"})
        ),
        "header long tensor name": partial(
            damage.edit_header, edit=lambda h: h.update({"n" * 10_000: damage.first(h)})
        ),
        "header entry a list": partial(damage.edit_header, edit=lambda h: h.update(x=[1, 2])),
    }
    for values in (
        {"dtype": "O"}, {"dtype": ["F32"]}, {"data_offsets": [-4, 0]}, {"data_offsets": [8, 0]}, {"data_offsets": [0, 2**60]},
        {"data_offsets": [0]}, {"data_offsets": "ab"}, {"data_offsets": [0.0, 4.0]}, {"shape": [2**40, 2**40]}, {"shape": [-1]},
        {"shape": "12"}, {"shape": [True]}, {"shape": [1] * 100}, {"code": "import os"},
    ):  # fmt: skip
        found[f"header {values}"] = damage.set_entry(**values)
    for text in (
        b"", b"[]", b"null", b"{}", b'{"a":', b"\xff\xfe", b'{"a": {"dtype": "F32"}}', b'{"__metadata__": {"format": "pt"}}',
    ):  # fmt: skip
        found[f"header {text!r}"] = partial(damage.raw_header, text=text)
    return found


def _shards() -> dict[str, Damage]:
    maps: dict[str, Any] = {
        "list": [1, 2], "null": None, "text": "a", "number": 5, "files are numbers": {"a": 1}, "files are lists": {"a": ["b"]}, "empty": {},
        "leaves the folder": lambda good: dict.fromkeys(good, "../vae/diffusion_pytorch_model.safetensors"),
        "absolute": lambda good: dict.fromkeys(good, "/etc/passwd"),
        "missing shard": lambda good: good | {min(good): "diffusion_pytorch_model-00002-of-00002.safetensors"},
        "missing tensor": lambda good: good | {"evil.weight": next(iter(good.values()))},
        "lists too few": lambda good: dict(list(good.items())[1:]),
        "a pickle": lambda good: dict.fromkeys(good, "evil.bin"),
    }  # fmt: skip
    found: dict[str, Damage] = {
        f"weight_map {name}": partial(damage.shard, weight_map=value) for name, value in maps.items()
    }
    found["list of shards a list"] = partial(put, name=f"{WEIGHTS['vae']}.index.json", content="[1]")
    return found


def _loaded() -> dict[str, Damage]:
    found: dict[str, Damage] = {}
    for part in WEIGHTS:
        found[f"{part} without three tensors"] = partial(damage.edit_tensors, part=part, edit=damage.remove_three)
        found[f"{part} with one too many"] = partial(
            damage.edit_tensors, part=part, edit=lambda t: t.update({"evil.weight": t[min(t)].clone()})
        )
        found[f"{part} with NaN"] = partial(damage.edit_tensors, part=part, edit=damage.fill(float("nan")))
        found[f"{part} with Inf"] = partial(damage.edit_tensors, part=part, edit=damage.fill(float("-inf")))
        found[f"{part} of another shape"] = partial(
            damage.edit_tensors, part=part, edit=lambda t: t.update({max(t): t[max(t)].new_zeros(3, 5)})
        )
    for name, changes in {
        "more layers than weights": {"num_layers": 3}, "100,000 layers": {"num_layers": 100_000}, "a million channels": {"ffn_dim": 10**6},
        "wide heads": {"num_attention_heads": 4096, "attention_head_dim": 4096}, "no heads": {"num_attention_heads": 0},
        "layers are text": {"num_layers": "two"}, "no layers": {"num_layers": 0}, "negative layers": {"num_layers": -1},
        "patch of nothing": {"patch_size": [0, 0, 0]}, "patch is text": {"patch_size": "abc"},
    }.items():  # fmt: skip
        found[f"transformer: {name}"] = partial(change, name="transformer/config.json", **changes)
    for name, changes in {
        "layers are text": {"num_layers": "x"}, "100,000 layers": {"num_layers": 100_000}, "no width": {"d_model": 0},
        "vocabulary of a million": {"vocab_size": 10**6},
    }.items():  # fmt: skip
        found[f"text_encoder: {name}"] = partial(change, name="text_encoder/config.json", **changes)
    found["vae: mult is text"] = partial(change, name="vae/config.json", dim_mult="abcd")
    found["vae: 1000 levels"] = partial(change, name="vae/config.json", dim_mult=[1] * 1000)
    found["vae: 10,000 blocks"] = partial(change, name="vae/config.json", num_res_blocks=10_000)
    for name, key in (("scheduler/scheduler_config.json", "flow_shift"), ("vae/config.json", "scale_factor_spatial")):
        found[f"{key} is text"] = partial(change, name=name, **{key: "x"})
        found[f"{key} is an object"] = partial(change, name=name, **{key: {"a": 1}})
    found["scheduler: unknown betas"] = partial(change, name="scheduler/scheduler_config.json", beta_schedule="evil")
    found["scheduler: negative steps"] = partial(change, name="scheduler/scheduler_config.json", num_train_timesteps=-5)
    found["scheduler: a class nobody has"] = partial(
        name_component, part="scheduler", entry=["diffusers", "EvilScheduler"]
    )
    found["tokenizer: a class nobody has"] = partial(
        name_component, part="tokenizer", entry=["transformers", "EvilTokenizer"]
    )
    texts = {"empty": "", "a list": "[]", "deep": DEEP, "cut": '{"model"', "no model": "{}", "binary": b"\xff\x00"}
    for name, text in texts.items():
        found[f"tokenizer.json {name}"] = partial(put, name="tokenizer/tokenizer.json", content=text)
    return found


JUDGED = _judged()
LOADED = _loaded()
