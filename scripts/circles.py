#!/usr/bin/env python3
"""Circles of imports between the files of a crate: whoever opens one shall not have to know all.

    scripts/circles.py [-v] ROOT.rs...      each is the first file of a crate; -v also says what imports what

A file imports another where a path of it (`use`, or in its code) leads to something that is defined there; what others re-export
counts as where it is defined, and a `pub use` that only does so as nothing. What is for tests alone is left out. A file and those
in the folder of its name are one idea: that they use what it defines is no circle. Methods are not seen, for no path names their
files. Prints each circle; exits with 1 where there is one.
"""
import collections
import os
import re
import sys

TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|b?r(\#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?'(?:\\(?:u\{[^}]*\}|x..|.)|[^\\'])'|'[A-Za-z_]\w*"""
    r"""|\#!?\[|[A-Za-z_]\w*|::|[0-9]\w*|\s+|.""",
    re.S,
)
NAME = re.compile(r"[A-Za-z_]")
OPENS = ("(", "[", "{", "#[", "#![")
DEFINES = ("fn", "struct", "enum", "trait", "type", "const", "static", "union")


def tokens(text):
    all = (found.group() for found in TOKEN.finditer(text))
    return [one for one in all if not one.isspace() and one[:2] not in ("//", "/*") and one[-1] not in "\"'"]


def behind(tokens, at):
    """Where what opens at `at` is closed."""
    depth = 0
    while at < len(tokens):
        depth += (tokens[at] in OPENS) - (tokens[at] in (")", "]", "}"))
        at += 1
        if depth == 0:
            break
    return at


def without_tests(tokens):
    out, at = [], 0
    while at < len(tokens):
        if tokens[at] != "#[":
            out.append(tokens[at])
            at += 1
            continue
        end = behind(tokens, at)
        attribute = tokens[at:end]
        if attribute[1] not in ("cfg", "test") or "test" not in attribute or {"not", "any"} & set(attribute):
            at = end
            continue
        # The item that follows: up to its semicolon, its block or, of a field, its comma.
        at = end
        while tokens[at] == "#[":
            at = behind(tokens, at)
        kind = next(one for one in tokens[at:] if one not in ("pub", "(", "crate", "super", ")", "async", "unsafe"))
        while at < len(tokens) and tokens[at] not in (")", "]", "}"):
            opens = tokens[at]
            at = behind(tokens, at) if opens in OPENS else at + 1
            if opens == ";" or opens == "{" and kind not in ("use", "const", "static", "let", "type"):
                break
            if opens == "," and kind not in ("fn", "struct", "impl", "enum", "mod", "use", "trait"):
                break
    return out


class Module:
    def __init__(self, file):
        self.file, self.defines, self.children, self.uses = file, set(), {}, {}
        self.globs, self.paths = [], []


def use_tree(tokens, at, prefix, out):
    """The paths of a `use` from `at` on, each with the name that it gives; where it ends."""
    path = list(prefix)
    while True:
        if tokens[at] == "{":
            at += 1
            while tokens[at] != "}":
                at = use_tree(tokens, at, path, out)
                at += tokens[at] == ","
            return at + 1
        if tokens[at] == "*":
            out.append((path, "*"))
            return at + 1
        path.append(tokens[at])
        at += 1
        if tokens[at] == "::":
            at += 1
            continue
        if path[-1] == "self":
            path.pop()
        name = path[-1] if path else ""
        if tokens[at] == "as":
            name, at = tokens[at + 1], at + 2
        out.append((path, name))
        return at


def outside_of_uses(tokens):
    names, at = set(), 0
    while at < len(tokens):
        if tokens[at] == "use":
            at = tokens.index(";", at)
        names.add(tokens[at])
        at += 1
    return names


def read(modules, path, file, folder, inner=None):
    """Read a module, and those in it."""
    module = modules.setdefault(path, Module(file))
    own = inner if inner is not None else without_tests(tokens(open(file).read()))
    elsewhere, at = outside_of_uses(own), 0

    def child(name):
        module.children[name] = path + (name,)
        inside = os.path.join(folder, name)
        found = next((one for one in (inside + ".rs", inside + "/mod.rs") if os.path.exists(one)), None)
        if found:
            read(modules, path + (name,), found, inside)

    while at < len(own):
        word = own[at]
        following = own[at + 1] if at + 1 < len(own) else ""
        if word == "#![":
            at = behind(own, at)
        elif word == "mod" and own[at + 2 : at + 3] == [";"]:
            child(following)
            at += 3
        elif word == "files" and own[at + 1 : at + 3] == ["!", "{"]:
            # A list of modules that a macro declares.
            end = behind(own, at + 2)
            for name in own[at + 3 : end - 1]:
                child(name)
            at = end
        elif word == "mod" and own[at + 2 : at + 3] == ["{"]:
            module.children[following] = path + (following,)
            end = behind(own, at + 2)
            read(modules, path + (following,), file, os.path.join(folder, following), own[at + 3 : end - 1])
            at = end
        elif word == "use" and following != "<":
            leads, begin = [], at + 1 + (following == "::")
            before = own[:at]
            while before and before[-1] in (")", "crate", "super", "in", "("):
                before.pop()
            at = use_tree(own, begin, [], leads)
            for lead, name in leads:
                if name == "*":
                    module.globs.append(lead)
                elif name != "_":
                    module.uses[name] = lead
                if before[-1:] != ["pub"] or name == "*" or name in elsewhere:
                    module.paths.append((lead, name == "*"))
        else:
            if word in DEFINES and NAME.match(following):
                module.defines.add(following)
            if word == "macro_rules":
                module.defines.add(own[at + 2])
            at += 1
            if NAME.match(word) and following == "::" and own[at - 2 : at - 1] != ["::"]:
                lead = [word]
                while own[at : at + 1] == ["::"] and NAME.match(own[at + 1]):
                    lead.append(own[at + 1])
                    at += 2
                module.paths.append((lead, False))


def defined_in(modules, known_ones, place, path, glob=False):
    """The file in which that is defined to what a path leads, seen from the module `place`; none where that is elsewhere."""
    key = (place, tuple(path), glob)
    if key not in known_ones:
        # Where the way leads back here there is nothing.
        known_ones[key] = None
        known_ones[key] = looked_up(modules, known_ones, place, path, glob)
    return known_ones[key]


def looked_up(modules, known_ones, place, path, glob):
    at = 0
    if not path:
        return None
    if path[0] == "crate":
        place, at = (), 1
    while at < len(path) and path[at] in ("self", "super"):
        place = place[:-1] if path[at] == "super" else place
        at += 1
    known = at > 0
    while at < len(path):
        module = modules.get(place)
        if module is None:
            return None
        name = path[at]
        if name in module.children:
            place, at, known = module.children[name], at + 1, True
        elif name in module.uses:
            lead = module.uses[name]
            # A crate that is called as what is taken from it.
            return None if lead[0] == name else defined_in(modules, known_ones, place, lead + path[at + 1 :])
        elif name in module.defines:
            return module.file
        else:
            rest = (defined_in(modules, known_ones, place, lead + path[at:]) for lead in module.globs
                    if lead[0] in ("crate", "self", "super", *module.children))
            found = next((one for one in rest if one), None)
            # What a macro has made is the module's own.
            return found or (module.file if known else None)
    # The module itself: only where all of it is taken.
    return modules[place].file if glob and place in modules else None


def imports(modules):
    own_and_above = {
        module.file: {modules[place[:depth]].file for depth in range(len(place) + 1) if place[:depth] in modules}
        for place, module in modules.items()
    }
    edges, known_ones = collections.defaultdict(lambda: collections.defaultdict(set)), {}
    for place, module in modules.items():
        for path, glob in module.paths:
            file = defined_in(modules, known_ones, place, path, glob)
            if file and file not in own_and_above[module.file]:
                edges[module.file][file].add("::".join(path))
    return edges


def circles(edges):
    """Sets of files of which each leads to all others: Tarjan's components of more than one."""
    index, low, stack, out = {}, {}, [], []

    def visit(file):
        index[file] = low[file] = len(index)
        stack.append(file)
        for other in list(edges.get(file, ())):
            if other not in index:
                visit(other)
            if other in stack:
                low[file] = min(low[file], low[other])
        if low[file] == index[file]:
            at = stack.index(file)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                out.append(sorted(component))

    for file in list(edges):
        if file not in index:
            visit(file)
    return out


def main(arguments):
    sys.setrecursionlimit(10000)
    found = 0
    for root in (one for one in arguments if one != "-v"):
        modules = {}
        read(modules, (), root, os.path.dirname(root))
        edges = imports(modules)
        for circle in circles(edges):
            found += 1
            print("these import each other:", *circle)
            for file in circle if "-v" in arguments else ():
                for other in sorted(edges[file].keys() & set(circle)):
                    print(f"    {file} imports of {other}:", *sorted(edges[file][other]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
