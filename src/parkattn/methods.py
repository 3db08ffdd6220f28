"""Every method by name: dense attention, PARK and its ablations, and the methods of installed packages.

A package offers methods by an entry point whose value is a `MethodEntry` or a sequence of them, as parklab does for its
baselines:

    [project.entry-points."parkattn.methods"]
    mine = "my_package:ENTRY"
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import warnings
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from parkattn import dense, park
from parkattn.checks import expect_choice, expect_string, shown
from parkattn.registry import MethodEntry
from parkattn.settings import Forecasts, MethodConfig
from parkattn.site import AttentionMethod

GROUP = "parkattn.methods"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # files and options are named after a method
# by other files of a comparison, and by --methods all
TAKEN = ("all", "heads", "index", "metrics", "raw", "report", "side_by_side")
MODULES = (dense, park)


class MethodTable(UserDict[str, MethodEntry]):
    """Entries by name. Installed packages are asked once: when it is listed, or lacks a wanted name."""

    complete = False

    def ask_packages(self) -> None:
        if not self.complete:
            self.complete = True  # before: loading a package may list the table
            register_installed()

    def __iter__(self) -> Iterator[str]:
        self.ask_packages()
        return iter(self.data)

    def __len__(self) -> int:
        self.ask_packages()
        return len(self.data)

    def __contains__(self, name: object) -> bool:
        if name not in self.data:
            self.ask_packages()
        return name in self.data

    def __missing__(self, name: str) -> MethodEntry:
        self.ask_packages()
        return self.data[name]


METHODS = MethodTable({entry.name: entry for module in MODULES for entry in module.ENTRIES})


def register(entry: MethodEntry) -> MethodEntry:
    """Make a method known by its name in this process."""
    if not isinstance(entry, MethodEntry):
        raise TypeError(
            f"entry: expected a MethodEntry, got {type(entry).__name__}; write MethodEntry(name, make, line, config)."
        )
    expect_string("name", entry.name)
    if NAME.fullmatch(entry.name) is None or entry.name in TAKEN:
        wanted = f"up to 64 letters, digits and _ . - after a letter or digit, and none of {', '.join(TAKEN)}"
        raise ValueError(f"name: expected {wanted}, got {shown(entry.name)}; choose another name.")
    known = METHODS.data.get(entry.name)
    if known is not None and known != entry:
        raise ValueError(f"entry: expected a new name, got {entry.name!r}, which is taken; choose another name.")
    if not isinstance(entry.config, type) or not issubclass(entry.config, MethodConfig):
        raise TypeError(
            f"config: expected a subclass of MethodConfig, got {shown(entry.config)}; "
            "write MethodEntry(..., config=MyConfig)."
        )
    if not isinstance(entry.budgets, tuple):
        raise TypeError(
            f"budgets: expected a tuple of field names, got {shown(entry.budgets)}; write budgets=('top_p',)."
        )
    fields = {field.name for field in dataclasses.fields(entry.config)}
    for budget in entry.budgets:
        expect_choice(f"budgets of {entry.name}", budget, fields)
    METHODS[entry.name] = entry
    return entry


def method_entry(name: str) -> MethodEntry:
    """The entry of a method, of another package's too."""
    expect_string("method", name)
    expect_choice("method", name, METHODS)
    return METHODS[name]


def register_installed() -> None:
    """Methods that installed packages offer. Loading one runs code of that package, which the user installed for it.

    A package that fails is named and left out. One that calls os._exit, never returns or crashes takes the process with
    it.
    """
    for point in entry_points(group=GROUP):
        try:
            offered = point.load()
            for entry in offered if isinstance(offered, Sequence) else (offered,):
                register(entry)
        except KeyboardInterrupt:
            raise
        # whatever another package does at import, SystemExit too: the others stay usable
        except BaseException as failure:
            said = f"{type(failure).__name__}: {failure}"
            warnings.warn(
                f"plug-in {point.value}: expected a MethodEntry, got {said}; correct or uninstall that package.",
                stacklevel=2,
            )


def register_from(where: str) -> MethodEntry:
    """The entry at "module:ENTRY", registered. Importing the module runs its code, which the user named."""
    module, colon, name = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), name) if module and colon and name else None
    except (Exception, SystemExit) as failure:
        said = f"{type(failure).__name__}: {failure}"
        advice = "set PYTHONPATH." if isinstance(failure, ModuleNotFoundError) else "import it by itself to see where."
        raise ValueError(
            f"method: expected module:ENTRY on the import path, got {shown(where)} ({shown(said)[1:-1]}); {advice}"
        ) from None
    if found is None:
        raise ValueError(
            f"method: expected module:ENTRY, got {shown(where)}; write for example my_package.window:ENTRY."
        )
    return register(found)


def configured_method(
    method: str | MethodEntry | AttentionMethod,
    config: MethodConfig | Mapping[str, Any] | str | None = None,
    *,
    model: str | None = None,
    **changes: Any,
) -> AttentionMethod:
    """A method from what a user said: a name, or an entry that is in no table. config: as for make_method, or the name
    of a profile or preset; None: what suits the model.

    changes override single fields of the config. A method that is given as an object is set already.
    """
    if not isinstance(method, (str, MethodEntry)):
        if not isinstance(method, AttentionMethod):
            raise TypeError(
                f"method: expected a name out of park methods or an AttentionMethod, got {shown(method)}; pass a name."
            )
        if config is not None or changes:
            raise ValueError(
                f"config: expected none beside a method that is set already, got {shown(config)} {shown(changes)}; "
                "set the method itself."
            )
        return method
    entry = method_entry(method) if isinstance(method, str) else method
    if config is None:
        return _made(entry, entry.config.for_model(model, **changes))
    if isinstance(config, str):
        return _made(entry, entry.config.named(config, model=model, **changes))
    if isinstance(config, Mapping):
        return _made(entry, entry.config.from_dict({**config, **changes}))
    # a method without settings of its own takes those of any other, and leaves them alone
    if entry.config in (MethodConfig, Forecasts) and isinstance(config, MethodConfig) and type(config) is not Forecasts:
        return _made(entry, entry.config(**changes))
    if isinstance(config, MethodConfig) and issubclass(entry.config, type(config)):
        config = entry.config.of(config)
    if not isinstance(config, entry.config):
        raise TypeError(
            f"config: expected a {entry.config.__name__}, the name of a preset, a mapping of fields or None for the "
            f"method {entry.name!r}, got {shown(config)}; pass one of these."
        )
    return _made(entry, config.replace(**changes))


def _made(entry: MethodEntry, config: MethodConfig) -> AttentionMethod:
    """Tables and summaries name a run by its method: it must be the name that was asked for."""
    made = entry.make(config)
    if made.name != entry.name:
        got = f"{shown(made.name)}; give both one name."
        raise ValueError(f"make: expected a method named {entry.name!r} as its entry is, got {got}")
    return made


def make_method(
    name: str | MethodEntry, config: MethodConfig | Mapping[str, Any] | None = None, **changes: Any
) -> AttentionMethod:
    """A fresh method with no state, by its name or entry. config: a value of its config type, a mapping of fields, or
    None for its defaults.

    changes override single fields.
    """
    entry = name if isinstance(name, MethodEntry) else method_entry(name)
    return configured_method(entry, entry.config() if config is None else config, **changes)
