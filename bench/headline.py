"""The runs behind the accuracies of RESULTS.md: makes the data, trains, judges and draws what was held out. Each command is
printed with the seconds it took as it ends; its output goes to OUT/NAME/COMMAND.log, what is drawn to OUT/NAME/drawn.

    python bench/headline.py phenaki nuwa ... --out OUT [--real DATA] [--lanes 2] [--seed 2] [--quick] [--timed COMMAND ...]

Runs of one OUT share their data, so --quick takes another one, and some take what another run there trained: these wait for it.
So many as there are lanes run beside each other, the first named first: while one compiles, another trains. One that fails stops
no other. A command of training has at most nine minutes: it is then stopped, and resumed in a second one. Who stops this script
stops all of them. DATA has the folders emoji, sprites and lowpoly. --quick shows within minutes, on a CPU, that everything runs.

Commands of --timed ("bench/beside.py mesh.tokenizer.train", "tessera bench video.loader") are run one after the other beside all
this by bench/quiet.py, so that runs stand still while something is timed, which counts in their seconds; what they print goes to
OUT/timed-N.log.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from draw import held_out
from processes import Commands, Failed

from tessera.pipeline import resolve
from tessera.recipes import RECIPES

MOST_SECONDS = 525.0  # of a command of training: saving then takes some more, and nine minutes are promised
MOST_TIMED = 540.0  # of a command of --timed, compiling included
MOST_COMMANDS = 6  # of training, of one run: more would mean that nothing is saved


@dataclass(frozen=True, slots=True)
class Headline:
    """One run. In commands OUT stands for the folder of all of them, RUN for the run's, STORY for the request of three scenes."""

    recipe: str
    data: str  # of `tessera data synth`: what, and its options; or the name of a folder of DATA
    sets: str
    then: tuple[str, ...]  # commands after training: of tessera, or a script of this folder
    stage: str = ""  # the only one that is trained; or several, each by a command of its own
    after: str = ""  # RUN/STAGE of another one: waits until that stage trains, so until all before it is there
    drawn: int = 0  # captions of what was held out that are drawn, with the options of the evaluation
    quick: str = ""  # more sets with --quick

    @property
    def kind(self) -> str:
        """Of its data."""
        return self.data.split()[0]


CLIPS = "data.start=first data.workers=4 engine.validate_every_steps=1000 engine.preview_every_steps=5000"
FRAMES = " ".join(f"base.loss.frames.{name}_prob={prob}" for name, prob in
                  {"prefix": 0.1, "between": 0.05, "later": 0.1, "shorter": 0.05}.items())  # fmt: skip
DIGITS, SHAPES, FURNITURE = "digits --n 48000", "shapes --n 40000 --max-shapes 2", "furniture --n 20000"
MESHES = "base.model.dropout=0.1 engine.validate_every_steps=500"
SPRITES = (
    "data.frames=13 data.start=first data.validation_fraction=0.1 text.length=160 base.steps=900 base.model.dropout=0.3 "
    "base.optim.warmup_steps=100 engine.validate_every_steps=150 engine.save_every_steps=150 engine.keep_checkpoints=8"
)
NOISY = "base.process.mean=1 base.process.std=2"  # where it is decided which of two things lies where
CASCADE = "text.length=64 sample.chunk=128 engine.validate_every_steps=1000"
QUICK = "engine.device=cpu engine.validation_samples=8"
QUICKLY = {
    "evaluate": "evaluate RUN --n 8",
    "data": "data prepare RUN --stage base",
    "bench/cascade.py": "bench/cascade.py RUN --n 4 --samplers dpm --steps 2",
    "bench/quiet.py": "bench/quiet.py bench/draw.py RUN --n 2",
    "bench/options.py": "bench/options.py RUN --n 2",
    "sample": "sample RUN --request STORY --out RUN/../story",
}
"""With --quick, by their first word."""
JUDGED = "evaluate RUN --n 256 --set sample.chunk=64"
TOLD = "sample RUN --request STORY -n 2 --out RUN/../story"
DRAWN = "bench/quiet.py bench/draw.py RUN"
COUNTED = "bench/options.py RUN --n 512"
SURELY = "bench/options.py RUN --n 2048"  # enough to tell directions apart: of each its share is then known to about a point
TRIED = "bench/options.py RUN --tries as-it-is"
BEST = ("evaluate RUN --n 144 --checkpoint best --set sample.chunk=48",)


def combined(recipe: str, tokenizer: str) -> Headline:
    """One of four: either generator on either tokenizer of digits, each for so many steps that they take a minute on an H200."""
    steps = {"phenaki": 1500, "nuwa": 1200}[recipe]  # of 40 and of 50 ms
    sets = f"base.needs.tokenizer=OUT/{tokenizer}/run/tokenizer base.steps={steps} base.optim.warmup_steps=200 {CLIPS}"
    began = "nuwa/base" if tokenizer == "nuwa" else tokenizer
    return Headline(recipe, DIGITS, sets, (COUNTED, DRAWN), after=began, quick="base.steps=2")


def processed(kind: str) -> Headline:
    """A decoder of shapes alone, by another process; on the embeddings of the whole cascade's run. Flow's times are logit-normal,
    which is EDM's noise log-normal: both are trained under the same noise."""
    noise = "" if kind == "ddpm" else f" {NOISY}"
    sets = f"embeddings.path=OUT/dalle2/run/embedder base.process.kind={kind}{noise} base.steps=1200 base.optim.lr=8e-4"
    then = ("bench/cascade.py RUN --n 256 --stages base --steps 16 32 --each",)
    return Headline(
        "dalle2",
        SHAPES,
        f"{sets} base.optim.warmup_steps=200 {CASCADE}",
        then,
        stage="base",
        after="dalle2/base",
        quick="base.steps=2",
    )


HEADLINES = {
    "phenaki": Headline(
        "phenaki", DIGITS, f"tokenizer.steps=2600 base.steps=6000 {CLIPS} {FRAMES}",
        (SURELY, JUDGED, TOLD, f"{TRIED} guidance=2 guidance=5 steps=32 order=confidence remask=0.5,steps=32"),
        stage="tokenizer base", drawn=8, quick="tokenizer.steps=2 base.steps=2",
    ),
    "nuwa": Headline(
        "nuwa", DIGITS, f"tokenizer.steps=2600 base.steps=4000 base.model.dropout=0.2 {CLIPS}",
        (SURELY, JUDGED, f"{TRIED} guidance=2 guidance=4"),
        stage="tokenizer base", drawn=8, quick="tokenizer.steps=2 base.steps=2",
    ),
    "nuwa-raster": Headline(
        "nuwa", DIGITS, "base.needs.tokenizer=OUT/nuwa/run/tokenizer base.steps=4000 base.model.dropout=0.2 "
        f"base.model.nearby.first_step=0 {CLIPS}", (SURELY,), after="nuwa/base", quick="base.steps=2",
    ),
    "cvivit": Headline(
        "phenaki", DIGITS, f"tokenizer.model.kind=cvivit tokenizer.steps=2600 {CLIPS}", ("data prepare RUN --stage base",),
        stage="tokenizer", quick="tokenizer.steps=2 tokenizer.model.window=3",
    ),
    "masked-conv": combined("phenaki", "nuwa"),
    "ar-conv": combined("nuwa", "nuwa"),
    "masked-cvivit": combined("phenaki", "cvivit"),
    "ar-cvivit": combined("nuwa", "cvivit"),
    "sprites": Headline(
        "phenaki", "sprites", f"tokenizer.steps=1500 {SPRITES}", BEST, drawn=32, quick="tokenizer.steps=2 base.steps=2",
    ),
    "sprites-nuwa": Headline(
        "nuwa", "sprites", f"tokenizer.steps=1500 data.crop=random data.zoom=1.1 {SPRITES}", BEST, drawn=32,
        quick="tokenizer.steps=2 base.steps=2",
    ),
    "dalle2": Headline(
        "dalle2", SHAPES,
        f"embedder.steps=1000 prior.steps=3000 prior.optim.lr=1e-3 base.steps=6000 base.optim.lr=8e-4 {NOISY} "
        f"upsampler1.steps=1200 upsampler1.optim.lr=8e-4 {CASCADE}",
        ("evaluate RUN --n 512", "evaluate RUN --n 512 --set evaluate.seed=1 sample.sampler=ddim sample.eta=1",
         "bench/cascade.py RUN --n 256 --samplers euler ddim --each", f"{TRIED} guidance=1.5 guidance=6 embedding_guidance=2"),
        drawn=8,
        quick="embedder.steps=2 prior.steps=2 base.steps=2 upsampler1.steps=2",
    ),
    "flow": processed("flow"),
    "edm": processed("edm"),
    "ddpm": processed("ddpm"),
    "emoji": Headline(
        "dalle2", "emoji",
        "data.validation_fraction=0.1 data.crop=random data.zoom=1.1 data.flip=true text.kind=minilm text.length=32 "
        "embedder.steps=600 embedder.model.dropout=0.1 prior.steps=1500 prior.optim.lr=1e-3 base.steps=2500 base.optim.lr=8e-4 "
        "base.model.dropout=0.3 upsampler1.steps=1200 upsampler1.optim.lr=8e-4 engine.validate_every_steps=500",
        ("evaluate RUN --n 164 --set sample.chunk=64",), drawn=32,
        quick="embedder.steps=2 prior.steps=2 base.steps=2 upsampler1.steps=2",
    ),
    "meshgpt": Headline(
        "meshgpt", FURNITURE, f"base.steps=2500 {MESHES}", ("evaluate RUN --n 256 --set sample.chunk=256",), drawn=8,
        quick="base.steps=2",
    ),
    "graph": Headline(
        "meshgpt", FURNITURE, f"tokenizer.kind=graph tokenizer.steps=6000 base.steps=2500 {MESHES}",
        ("evaluate RUN --n 256 --set sample.chunk=256",), drawn=8, quick="tokenizer.steps=2 base.steps=2",
    ),
    "lowpoly": Headline(
        "meshgpt", "lowpoly",
        "base.steps=3000 data.yaw=quarters data.scale=1.2 base.model.dropout=0.2 data.validation_fraction=0.06 "
        "engine.validate_every_steps=500 engine.save_every_steps=500 engine.keep_checkpoints=8",
        ("evaluate RUN --n 24 --checkpoint best --set sample.chunk=24",), drawn=24, quick="base.steps=2",
    ),
}  # fmt: skip


HERE = Path(__file__).parent.absolute()
STORY = HERE / "story.yaml"
DONE = "done"  # a file in the folder of a run that came to its end


@dataclass(slots=True)
class Running:
    """A run and what became of it."""

    name: str
    asked: argparse.Namespace
    commands: Commands
    thread: threading.Thread | None = None
    failure: str = ""

    @property
    def headline(self) -> Headline:
        """What it is."""
        return HEADLINES[self.name]

    @property
    def home(self) -> Path:
        """Its folder."""
        return Path(self.asked.out / (self.name if self.asked.seed == 0 else f"{self.name}-seed{self.asked.seed}"))

    @property
    def data(self) -> Path:
        """What it learns from."""
        return Path((self.asked.real if " " not in self.headline.data else self.asked.out) / self.headline.kind)

    @property
    def over(self) -> bool:
        """Whether it came to an end, good or bad."""
        return bool(self.failure) or (self.thread is not None and not self.thread.is_alive())

    def ready(self, others: dict[str, Running]) -> bool:
        """Whether what it needs is there; if nobody makes it, it fails."""
        if not self.headline.after:
            return True
        name, _, stage = self.headline.after.partition("/")
        home = self.asked.out / name
        if written(home / "run" / stage / "metrics.jsonl") if stage else (home / DONE).exists():
            return True
        other = others.get(name) if self.asked.seed == 0 else None  # what others need is that of seed 0
        if other is None:
            self.failure = f"needs {self.headline.after} in {self.asked.out}; name {name} as well, or train it first, with seed 0"
        elif other.failure:
            self.failure = f"{name} failed, and it needs that one"
        elif other.over:
            self.failure = f"{name} has ended without {stage}, which it needs"
        return False

    def start(self) -> None:
        """In a thread."""
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            if self.home.exists():
                raise Failed(f"{self.home} is there already; take another --out, or remove it")
            self.home.mkdir(parents=True)
            train(self)
            for number, line in enumerate(self.headline.then):
                words = (QUICKLY[line.split()[0]] if self.asked.quick else line).split()
                names = {"RUN": str(self.home / "run"), "STORY": str(STORY)}
                command(self, f"then-{number + 1}", [replaced(word, names) for word in words])
            if self.headline.drawn:
                draw(self)
            (self.home / DONE).touch()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            print(f"{self.name}: {self.failure}", flush=True)


def main() -> None:
    """Starts what can start, until all is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=HEADLINES, metavar="name", help=", ".join(HEADLINES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--real", type=Path, default=Path("data"), help="with the folders emoji, sprites and lowpoly")
    parser.add_argument("--lanes", type=int, default=1, help="runs beside each other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny nets, few samples, two steps")
    parser.add_argument("--timed", nargs="+", default=[], metavar="COMMAND", help="of timing, run beside all of them")
    parser.add_argument("--tessera", default=f"{shlex.quote(sys.executable)} -m tessera", help="the command that is run")
    asked = parser.parse_args()
    asked.out = asked.out.absolute()
    commands = Commands()
    runs = {name: Running(name, asked, commands) for name in asked.names}
    failures: list[str] = []
    timing = threading.Thread(target=time_beside, args=(asked, commands, failures), daemon=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
        timing.start()
        make_data(list(runs.values()), asked, commands)
        while not all(run.over for run in runs.values()) or timing.is_alive():
            for run in runs.values():
                busy = sum(other.thread is not None and not other.over for other in runs.values())
                if run.thread is None and not run.over and busy < asked.lanes and run.ready(runs):
                    run.start()
            time.sleep(0.2)
    finally:
        commands.stop()
    for run in runs.values():
        print(f"{run.name}: {run.failure.splitlines()[0] if run.failure else 'done'}", flush=True)
    raise SystemExit(any(run.failure for run in runs.values()) or bool(failures))


def time_beside(asked: argparse.Namespace, commands: Commands, failures: list[str]) -> None:
    """One after the other; what fails is told at once."""
    for number, words in enumerate(asked.timed, start=1):
        try:
            line = f"{shlex.quote(sys.executable)} {shlex.quote(str(HERE / 'quiet.py'))} {inside(words)}"
            if not commands.call(asked.out / f"timed-{number}.log", line, MOST_TIMED, "timed"):
                failures.append(f"timed: stopped after {MOST_TIMED:.0f} s: {words}")
                print(failures[-1], flush=True)
        except (Failed, ValueError) as error:  # of a command that does not ask for anything, too
            failures.append(f"timed: {words}: {error}")
            print(failures[-1], flush=True)


def inside(words: str) -> str:
    """A command, with the path of a script of this folder."""
    return shlex.join(str(HERE.parent / word) if word.startswith("bench/") else word for word in shlex.split(words))


def make_data(runs: list[Running], asked: argparse.Namespace, commands: Commands) -> None:
    """What is missing, each kind once."""
    for run in runs:
        if run.data.exists():
            continue
        if " " not in run.headline.data:
            raise SystemExit(f"{run.data} is not there; {run.name} is trained on it: say with --real where its folder lies")
        what = run.headline.data if not asked.quick else f"{run.headline.kind} --n 80"
        line = f"{asked.tessera} data synth {what} --out {shlex.quote(str(run.data))}"
        commands.call(asked.out / f"{run.headline.kind}.log", line, math.inf, "")


def sets_of(headline: Headline, out: Path, quick: bool) -> list[str]:
    """What it changes of its preset; with `quick` the later ones win."""
    items = (f"{headline.sets} {headline.quick} {QUICK}" if quick else headline.sets).split()
    return list({item.partition("=")[0]: item.replace("OUT", str(out.absolute())) for item in items}.values())


def train(run: Running) -> None:
    """In as many commands of nine minutes as it takes."""
    preset, place = ["--preset", "tiny"] if run.asked.quick else [], str(run.home / "run")
    sets = ["--set", f"seed={run.asked.seed}", *sets_of(run.headline, run.asked.out, run.asked.quick)]
    begin = ["train", run.headline.recipe, "--data", str(run.data), "--run", place, *preset]
    number = 0
    for name in run.headline.stage.split() or [""]:
        stage, done = ["--stage", name] if name else [], False
        while not done:
            number += 1
            if number > MOST_COMMANDS:
                raise Failed(f"not trained after {MOST_COMMANDS} commands of {MOST_SECONDS:.0f} s")
            words = ["resume", place, *stage] if number > 1 else [*begin, *stage, *sets]
            done = command(run, f"train-{number}", words)


def draw(run: Running) -> None:
    """Captions that were held out, through the checkpoint and in the chunks of the evaluation."""
    place = run.home / "run"
    config = resolve(run.headline.recipe, preset="tiny" if run.asked.quick else "small", data=str(run.data), steps=None,
                     sets=sets_of(run.headline, run.asked.out, run.asked.quick))  # fmt: skip
    number = 2 if run.asked.quick else run.headline.drawn
    captions = held_out(RECIPES[run.headline.recipe].medium, config.data, 32)[:number]
    (run.home / "captions.txt").write_text("".join(f"{caption}\n" for caption in captions))
    words = next(line for line in reversed(run.headline.then) if line.startswith("evaluate")).split()
    best = ["--checkpoint", "best"] if "best" in words else []
    chunk = [word for word in words if word.startswith("sample.chunk")]
    options = ["--prompts", str(run.home / "captions.txt"), "--out", str(run.home / "drawn"), *best]
    command(run, "draw", ["sample", str(place), *options, *(["--set", *chunk] if chunk else [])])


def replaced(word: str, names: dict[str, str]) -> str:
    """With what the names stand for."""
    return re.sub("|".join(names), lambda found: names[found[0]], word)


def command(run: Running, log: str, words: list[str]) -> bool:
    """Whether it came to its end within its time."""
    program = shlex.quote(sys.executable) if words[0].startswith("bench/") else run.asked.tessera
    limit = MOST_SECONDS if words[0] in ("train", "resume") else math.inf
    return run.commands.call(run.home / f"{log}.log", f"{program} {inside(shlex.join(words))}", limit, run.name)


def written(path: Path) -> bool:
    """Whether there is something in it."""
    return path.exists() and path.stat().st_size > 0


if __name__ == "__main__":
    main()
