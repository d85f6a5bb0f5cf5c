"""What each process of ``test_two_processes`` runs: a Trainer of its own share of the rows."""

import sys

from training import Recorder, assert_own_gradients, make_model, make_rows, make_trainer

from gradtrail.callbacks import GradTrailCallback


def main(folder):
    rows, recorder, merged = make_rows(), Recorder(copies=True), []
    trainer = make_trainer(
        make_model("llama"),
        folder,
        [GradTrailCallback([recorder, merged.append])],
        rows=rows,
        max_steps=3,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    assert_own_gradients(recorder, rows)
    sizes = [len(block.ids) for block in merged]
    rank, world = trainer.args.process_index, trainer.args.world_size
    sys.stdout.write(f"rank {rank} of {world}: {sizes}\n")


if __name__ == "__main__":
    main(sys.argv[1])
