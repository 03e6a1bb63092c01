"""The runs behind the accuracies of RESULTS.md: makes the data, trains, judges held-out combinations. Each command is printed
with the seconds it took, and its output goes to OUT/NAME/COMMAND.log.

    python bench/headline.py phenaki nuwa dalle2 meshgpt graph --out OUT [--seed 2] [--quick]

Runs of one OUT share their data, and nuwa takes the tokenizer of phenaki's run there. A command of training has at most nine
minutes: it is then stopped, and resumed in a second one. --quick shows within minutes, on a CPU, that everything runs.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MOST_SECONDS = 540  # of a command of training


@dataclass(frozen=True, slots=True)
class Headline:
    """One run. In commands OUT stands for the folder of all of them."""

    recipe: str
    data: str  # of tessera data synth: what, and its options
    sets: str
    judged: str  # options of tessera evaluate
    quick: str = ""  # more sets with --quick

    @property
    def kind(self) -> str:
        """Of its data."""
        return self.data.split()[0]


CLIPS = "data.start=first engine.validate_every_steps=1000 engine.preview_every_steps=5000"
FRAMES = " ".join(f"base.loss.frames.{name}_prob={prob}" for name, prob in
                  {"prefix": 0.1, "between": 0.05, "later": 0.1, "shorter": 0.05}.items())  # fmt: skip
MESHES = "base.model.dropout=0.1 engine.validate_every_steps=500"
QUICK = "engine.device=cpu engine.validation_samples=8"

HEADLINES = {
    "phenaki": Headline(
        "phenaki", "digits --n 16000", f"tokenizer.steps=2600 base.steps=5000 {CLIPS} {FRAMES}", "--n 512 --set sample.chunk=64",
        "tokenizer.steps=2 base.steps=2",
    ),
    "nuwa": Headline(
        "nuwa", "digits --n 16000", f"base.needs.tokenizer=OUT/phenaki/run/tokenizer base.steps=4000 {CLIPS}",
        "--n 512 --set sample.chunk=64", "base.steps=2",
    ),
    "dalle2": Headline(
        "dalle2", "shapes --n 40000 --max-shapes 2",
        "pair.steps=1000 prior.steps=3000 prior.optim.lr=1e-3 base.steps=4000 base.optim.lr=8e-4 superres.steps=1500 "
        "superres.optim.lr=8e-4 text.length=64 sample.chunk=128 engine.validate_every_steps=1000",
        "--n 512", "pair.steps=2 prior.steps=2 base.steps=2 superres.steps=2",
    ),
    "meshgpt": Headline(
        "meshgpt", "furniture --n 20000", f"base.steps=2500 {MESHES}", "--n 256 --set sample.chunk=256", "base.steps=2",
    ),
    "graph": Headline(
        "meshgpt", "furniture --n 20000", f"tokenizer.kind=graph tokenizer.steps=6000 base.steps=3000 {MESHES}",
        "--n 256 --set sample.chunk=256", "tokenizer.steps=2 base.steps=2",
    ),
}  # fmt: skip


def main() -> None:
    """One after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=HEADLINES, metavar="name", help=", ".join(HEADLINES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny nets, few samples, two steps")
    asked = parser.parse_args()
    for name in asked.names:
        headline = HEADLINES[name]
        home = asked.out / (name if asked.seed == 0 else f"{name}-seed{asked.seed}")
        home.mkdir(parents=True)
        data = asked.out / headline.kind
        if not data.exists():
            what = headline.data if not asked.quick else f"{headline.kind} --n 80"
            tessera(home / "synth.log", "data", "synth", *what.split(), "--out", str(data))
        train(headline, data, home, asked.seed, asked.quick)
        judged = headline.judged if not asked.quick else "--n 8"
        tessera(home / "evaluate.log", "evaluate", str(home / "run"), *judged.split())
        print((home / "evaluate.log").read_text(), flush=True)


def sets_of(headline: Headline, out: Path, quick: bool) -> list[str]:
    """What it changes of its preset; with `quick` the later ones win."""
    items = f"{headline.sets} {headline.quick} {QUICK}" if quick else headline.sets
    return list({item.partition("=")[0]: item for item in items.replace("OUT", str(out.absolute())).split()}.values())


def train(headline: Headline, data: Path, home: Path, seed: int, quick: bool) -> None:
    """In as many commands of nine minutes as it takes."""
    preset = ("--preset", "tiny") if quick else ()
    sets = (f"seed={seed}", *sets_of(headline, home.parent, quick))
    options = ("--data", str(data), "--run", str(home / "run"), *preset, "--set", *sets)
    done = tessera(home / "train-1.log", "train", headline.recipe, *options)
    command = 1
    while not done:
        command += 1
        done = tessera(home / f"train-{command}.log", "resume", str(home / "run"))


def tessera(log: Path, *words: str) -> bool:
    """Whether it came to its end within its time; another failure ends all."""
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "tessera", *words], stdout=file, stderr=subprocess.STDOUT)
        try:
            process.wait(MOST_SECONDS if words[0] in ("train", "resume") else None)
            stopped = False
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait()
            stopped = True
    print(f"{time.monotonic() - start:6.0f} s  tessera {' '.join(words)}", flush=True)
    if process.returncode and not stopped:
        raise SystemExit(
            f"failed with code {process.returncode}; its last lines:\n" + "\n".join(log.read_text().splitlines()[-8:])
        )
    return not stopped


if __name__ == "__main__":
    main()
