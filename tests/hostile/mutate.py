"""Damaged and hostile model files, made from good ones by a seed: the archive's bytes and directory, its records, the opcodes and numbers of its pickles, the tokens of its code, the values of its JSON.

A mutation leaves the rest of the file as it should be: checksums and directory fit unless they are what was changed, so that it reaches what lies behind them.
"""
import io
import json
import pickletools
import random
import re
import struct
import zipfile


def records(path):
    """Name -> bytes, in the order of the file."""
    with zipfile.ZipFile(path) as z:
        return {name: z.read(name) for name in z.namelist()}


def archive(contents, deflate=lambda name: name.endswith((".py", ".debug_pkl"))):
    """The bytes of a zip file with these records; a list of pairs may have a name twice."""
    pairs = contents.items() if isinstance(contents, dict) else contents
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, data in pairs:
            z.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED if deflate(name) else zipfile.ZIP_STORED)
    return out.getvalue()


def flip_bytes(draw, data, most=8):
    data = bytearray(data)
    for _ in range(draw.randint(1, most)):
        data[draw.randrange(len(data))] = draw.choice([draw.randrange(256), 0, 255, 127, 128])
    return bytes(data)


def cut_or_repeat(draw, data):
    begin, end = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return draw.choice([data[:begin] + data[end:], data[:end] + data[begin:], data[:end], data[begin:end] * draw.choice([2, 50])])


def rare_number(draw):
    return draw.choice([0, 1, -1, 2, 7, 255, 256, 2**15, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), draw.randrange(-(2**63), 2**63)])


def int_opcode(number):
    return b"\x8a\x08" + struct.pack("<q", number)


def opcodes(data):
    """(begin, end, opcode, argument) of each; up to where the pickle is broken."""
    found = []
    try:
        for opcode, argument, at in pickletools.genops(data):
            if found:
                found[-1][1] = at
            found.append([at, len(data), opcode, argument])
    except Exception:
        pass
    return found


def change_pickle(draw, data):
    """A pickle with numbers, opcodes, names or strings of it changed, in order and of opcodes that fit."""
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        ops = opcodes(data)
        if not ops:
            return flip_bytes(draw, data) if data else b"\x80\x02."
        numbers = [op for op in ops if op[2].name in ("BININT", "BININT1", "BININT2", "LONG1")]
        strings = [op for op in ops if op[2].name in ("BINUNICODE", "GLOBAL")]
        how = draw.random()
        if how < 0.4 and numbers:
            begin, end, _, _ = draw.choice(numbers)
            new = int_opcode(rare_number(draw))
        elif how < 0.6 and strings:
            begin, end, opcode, argument = draw.choice(strings)
            other = draw.choice(strings)
            new = data[other[0] : other[1]] if draw.random() < 0.5 else (opcode.code.encode("latin1") + struct.pack("<I", 5) + b"cuda:" if opcode.name == "BINUNICODE" else b"ctorch\n" + draw.choice([b"DoubleStorage", b"QInt8Storage", b"ByteStorage", b"device", b"Tensor", b"NoStorage"]) + b"\n")
        elif how < 0.8:
            begin, end, _, _ = draw.choice(ops[1:] or ops)
            other = draw.choice(ops)
            new = draw.choice([b"", data[other[0] : other[1]], data[begin:end] * 2, b"h" + bytes([draw.randrange(30)]), b"0", b"2", b"a", b"e", b"u", b"R", b"b", b"Q", b"N", b"\x86"])
        else:
            begin, end = sorted(draw.randrange(2, len(data)) for _ in range(2)) if len(data) > 4 else (0, 0)
            new = flip_bytes(draw, data[begin : begin + 1]) if begin < len(data) else b""
            end = begin + 1
        data = data[:begin] + new + data[end:]
    return data


TOKEN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*|[0-9.]+|\s+|.", re.S)


def change_code(draw, data):
    """TorchScript code with tokens of it left out, doubled, exchanged, or with rare ones in their place."""
    tokens = TOKEN.findall(data.decode("utf-8", "replace"))
    if len(tokens) < 2:
        return data
    for _ in range(draw.choice([1, 1, 2, 5])):
        i, j = draw.randrange(len(tokens)), draw.randrange(len(tokens))
        how = draw.random()
        if how < 0.3:
            tokens[i] = tokens[j]
        elif how < 0.45:
            tokens[i] = ""
        elif how < 0.6:
            tokens[i] = tokens[i] * 2
        elif how < 0.7:
            tokens[i], tokens[j] = tokens[j], tokens[i]
        else:
            number = [k for k, t in enumerate(tokens) if t.isdigit()]
            k = draw.choice(number) if number and draw.random() < 0.7 else i
            tokens[k] = draw.choice(["0", "-1", "1", "3", "9223372036854775807", "99999999999999999999999", "1e400", "None", "self", "[]", "True", "inf", '"' + "x" * 1000 + '"', "torch.zeros([1, 1])", "((((1))))", "List[int]"])
    return "".join(tokens).encode()


def places(value, found):
    """(container, key) of everything in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found.append((value, key))
        places(value[key], found)
    return found


def other_json(draw, value, everything):
    """Something else in the place of a value, often of its type."""
    where, key = draw.choice(everything)
    if isinstance(value, str) and draw.random() < 0.7:
        return draw.choice(["", "x" * 1000, "cuda:99", "NaN", value + value, value[:-1], value.upper(), "torch.ops.aten.mm.default", "torch.ops.aten.add_.Tensor", "torch.ops.no.such.op",
                            "_operator.pow", "a.b.c.d", "..", "s0", "Symbol('s0')", "\u0000", "9" * 40, "../../x", next((str(w[k]) for w, k in [draw.choice(everything) for _ in range(20)] if isinstance(w[k], str)), "y")])
    if isinstance(value, (int, float)) and draw.random() < 0.8:
        return draw.choice([rare_number(draw), rare_number(draw), draw.randrange(-3, 12), 1e400, 0.5, True, False])
    return draw.choice([None, [], {}, "", 0, [[]], {"as_none": True}, {"as_int": rare_number(draw)}, where[key], where])


def change_json(draw, data):
    """JSON with values of it changed, left out, doubled, exchanged, or put elsewhere."""
    try:
        root = json.loads(data)
    except ValueError:
        return flip_bytes(draw, data) if data else b"{}"
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        everything = places(root, [])
        if not everything:
            break
        where, key = draw.choice(everything)
        how = draw.random()
        if how < 0.45:
            where[key] = other_json(draw, where[key], everything)
        elif how < 0.6:
            del where[key]
        elif how < 0.7 and isinstance(where, list):
            where.insert(draw.randrange(len(where) + 1), where[key])
        elif how < 0.8 and isinstance(where, list):
            other = draw.randrange(len(where))
            where[key], where[other] = where[other], where[key]
        elif how < 0.9 and isinstance(where, dict):
            where[draw.choice(["as_int", "as_tensor", "as_tensors", "as_none", "as_expr", "name", "x" * 300, str(key).upper()])] = where.pop(key)
        else:
            like = [(w, k) for w, k in everything if k == key]
            w, k = draw.choice(like)
            where[key], w[k] = w[k], where[key]
        root = json.loads(json.dumps(root))  # what was put elsewhere is a copy
    return json.dumps(root).encode()


def nested_json(draw, data, n):
    try:
        root = json.loads(data)
    except ValueError:
        return data
    mark = "a place that is not there twice"
    everything = places(root, [])
    if not everything:
        return data
    where, key = draw.choice(everything)
    where[key] = mark
    kind = draw.choice(["[", '{"a":', '{"as_none":', '{"as_tensor":{"name":'])
    deep = kind * n + "1" + ("]" if kind == "[" else "}" * kind.count("{")) * n
    return json.dumps(root).replace(json.dumps(mark), draw.choice([deep, json.dumps("a." * n + "b"), json.dumps("x" * n), "[" + "1," * n + "1]"])).encode()


def nested(draw, data):
    """Code, a pickle or JSON that is nested beyond measure somewhere."""
    n = draw.choice([200, 900, 1500, 10_000, 200_000])
    if data[:1] in (b"{", b"["):
        return nested_json(draw, data, n)
    if data[:1] == b"\x80":
        deep = draw.choice([b"]" * n + b"a" * (n - 1), b"N" + b"\x85" * n, b"(" * n + b"t" * n, b"}" + b"}" * n])
        ops = opcodes(data)
        at = draw.choice(ops)[0] if ops else 2
        return data[:at] + deep + data[at:]
    text = data.decode("utf-8", "replace")
    at = text.find("    return")
    if at < 0:
        return data
    n = min(n, 20_000)
    statement = draw.choice([
        "    z = " + "(" * n + "1" + ")" * n, "    z = " + "[" * n + "1" + "]" * n, "    z = " + "-" * n + "1", "    z = " + "not " * n + "True", "    z = 1" + " + 1" * n, "    z = 1" + " ** 1" * n,
        "    z = " + "torch.neg(" * n + "x" + ")" * n, "    z = x" + ".T" * n, "    z = annotate(" + "List[" * n + "int" + "]" * n + ", [])", "    z = " + "1 if True else " * n + "2", "    z = [" + "1, " * n + "1]",
        "\n".join("    " + "  " * min(i, 1200) + "if True:" for i in range(min(n, 1200))) + "\n    " + "  " * min(n, 1200) + "z = 1",
        "\n".join(f"    z{i} = torch.zeros([1])" for i in range(n)),
    ])  # fmt: skip
    return (text[:at] + statement + "\n" + text[at:]).encode()


def change_directory(draw, whole):
    """The zip file's own numbers: headers, directory, end."""
    begin = whole.rindex(b"PK\x01\x02") if draw.random() < 0.3 else whole.index(b"PK\x01\x02")
    for _ in range(draw.choice([1, 1, 3])):
        at = draw.randrange(begin, len(whole)) if draw.random() < 0.8 else draw.randrange(min(64, len(whole)))
        new = draw.choice([bytes([draw.randrange(256)]), struct.pack("<I", draw.choice([0, 1, 2**31, 2**32 - 1])), struct.pack("<H", 0xFFFF)])
        whole = whole[:at] + new + whole[at + len(new) :]
    return whole


def exported(contents):
    """Whether these are a program of torch.export."""
    return any("/models/" in name for name in contents)


def mutated(path, seed):
    """(what was done, the bytes) of one bad file; the same for the same seed."""
    draw = random.Random(f"{seed}")
    contents = records(path)
    names = list(contents)
    kind = draw.choice(["bytes", "directory", "cut", "record", "record", "pickle", "pickle", "pickle", "pickle", "code", "code", "code", "nested", "names", "debug", "weights"])
    if exported(contents):
        kind = draw.choice(["bytes", "directory", "cut", "record", "names", "names", "weights", "nested", *["json"] * 12])
    if kind in ("bytes", "directory", "cut"):
        whole = path.read_bytes()
        change = {"bytes": flip_bytes, "directory": change_directory, "cut": cut_or_repeat}[kind]
        return kind, change(draw, whole)
    if kind == "names":
        name, other = draw.choice(names), draw.choice(names)
        how = draw.choice(["drop", "double", "swap", "rename", "case", "deflate"])
        if how == "drop":
            del contents[name]
        elif how == "double":
            return f"names: {name} twice", archive([*contents.items(), (name, contents[other])])
        elif how == "swap":
            contents[name], contents[other] = contents[other], contents[name]
        elif how == "rename":
            contents = {n + "x" if n == name else n: d for n, d in contents.items()}
        elif how == "case":
            return f"names: {name} in capitals too", archive([*contents.items(), (name.upper(), contents[other])])
        else:
            return "names: all deflated", archive(contents, lambda _: True)
        return f"names: {how} {name}", archive(contents)
    wanted = {"pickle": lambda n: n.endswith(("data.pkl", "constants.pkl")), "code": lambda n: n.endswith(".py"), "nested": lambda n: n.endswith((".py", "data.pkl", "constants.pkl")), "debug": lambda n: n.endswith(".debug_pkl"), "weights": lambda n: "/data/" in n or "/constants/" in n, "json": lambda n: n.endswith(".json")}
    if exported(contents):
        wanted["nested"] = wanted["json"]
    fitting = [n for n in names if wanted.get(kind, lambda n: True)(n)] or names
    name = draw.choice(fitting)
    data = contents[name]
    if kind == "pickle" or (kind == "debug" and draw.random() < 0.8):
        data = change_pickle(draw, data)
    elif kind == "code":
        data = change_code(draw, data)
    elif kind == "json":
        data = change_json(draw, data)
    elif kind == "nested":
        data = nested(draw, data)
    elif data:
        data = draw.choice([flip_bytes, cut_or_repeat])(draw, data)
    contents[name] = data
    return f"{kind}: {name}", archive(contents)
