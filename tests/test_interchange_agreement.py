"""Subject-verb agreement in a small transformer: the subspace, its controls, and held-out nouns."""

import pytest
import torch
from torch.nn import functional as F

from gradtrail.interchange import (
    Site,
    arbitrary_targets,
    collect_activations,
    fit_das,
    interchange_accuracy,
    mean_difference_basis,
    placebo_accuracy,
    random_basis,
    reinitialized,
)

NOUNS, SHOWN, VERBS, PREPOSITIONS = 24, 16, 4, 3
ADVERB, NOUN, PREPOSITION, VERB, VOCAB = 1, 10, 60, 70, 80
AT_NOUN = 2


def sentences(count, generator, nouns, *, attracted):
    """Adverb (it decides the verb), "the", noun, perhaps with another noun behind it.

    Returns tokens, verb, number and noun. The verb's form follows the first noun's number.
    """
    verb = torch.randint(VERBS, (count,), generator=generator)
    noun = torch.tensor(nouns)[torch.randint(len(nouns), (count,), generator=generator)]
    number = torch.randint(2, (count,), generator=generator)
    the = torch.zeros(count, dtype=torch.long)
    tokens = [ADVERB + verb, the, NOUN + 2 * noun + number]
    if attracted:
        other = torch.randint(2 * NOUNS, (count,), generator=generator)
        tokens += [
            PREPOSITION + torch.randint(PREPOSITIONS, (count,), generator=generator),
            the,
            NOUN + other,
        ]
    return torch.stack(tokens, 1), verb, number, noun


def verbs_of(model, tokens):
    return model(tokens).logits[:, -1, VERB : VERB + 2 * VERBS]


def trained(*, attracted, width, layers, steps):
    """Train a transformer on the task until it knows it."""
    transformers = pytest.importorskip("transformers")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_embd=width,
            n_layer=layers,
            n_head=width // 16,
            vocab_size=VOCAB,
            n_positions=8,
            bos_token_id=None,
            eos_token_id=None,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        model = transformers.GPT2LMHeadModel(config)
        generator = torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(steps):
            tokens, verb, number, _ = sentences(128, generator, range(NOUNS), attracted=attracted)
            optimizer.zero_grad()
            loss = F.cross_entropy(verbs_of(model, tokens), 2 * verb + number)
            loss.backward()
            optimizer.step()
    return model.eval()


def pairs(count, seed, nouns, *, attracted):
    """Pairs whose numbers differ, so that leaving the base as it is is always wrong.

    Returns bases, sources, targets (the base's verb in the source's number) and sources' nouns.
    """
    generator = torch.Generator().manual_seed(seed)
    base, verb, own, _ = sentences(4 * count, generator, nouns, attracted=attracted)
    source, _, number, noun = sentences(4 * count, generator, nouns, attracted=attracted)
    kept = (own != number).nonzero()[:count, 0]
    return base[kept], source[kept], (2 * verb + number)[kept], noun[kept]


def block(model):
    """The first block's output; some releases return a tuple from a block."""
    with torch.no_grad():
        output = model.transformer.h[0](torch.zeros(1, 3, model.config.n_embd))
    return Site("transformer.h.0", 0 if isinstance(output, tuple) else None)


def check(model, site, *, attracted):
    """Find number on some nouns, and hold it against its controls on others."""
    shown = pairs(384, 5, range(SHOWN), attracted=attracted)
    held = pairs(400, 6, range(SHOWN, NOUNS), attracted=attracted)
    at = {name: torch.full((384,), AT_NOUN) for name in ("base_positions", "source_positions")}
    options = {"rank": 1, "epochs": 12, "lr": 2e-2, **at}

    def search(model, targets):
        return fit_das(model, site, *shown[:2], targets, verbs_of, **options).subspace

    def accuracy(basis, targets=held[2], model=model, function=interchange_accuracy):
        places = {name: torch.full((400,), AT_NOUN) for name in at}
        return function(model, site, basis, *held[:2], verbs_of, targets, **places)

    def by_lot(data):
        """The base's verb in a number that is drawn for each of the sources' nouns."""
        return 2 * (data[2] // 2) + arbitrary_targets(data[3], 2, seed=3)

    with torch.no_grad():
        tokens, verb, number, _ = sentences(
            500, torch.Generator().manual_seed(9), range(NOUNS), attracted=attracted
        )
        assert (verbs_of(model, tokens).argmax(1) == 2 * verb + number).double().mean() > 0.97
    found = search(model, shown[2])
    assert accuracy(found) >= 0.9
    width = model.config.n_embd
    for seed in range(3):
        assert accuracy(random_basis(width, 1, seed=seed)) <= 0.3
    assert accuracy(found, function=placebo_accuracy) <= 0.3
    assert accuracy(search(model, by_lot(shown)), by_lot(held)) <= 0.7
    untrained = reinitialized(model, seed=4)
    assert accuracy(search(untrained, shown[2]), model=untrained) <= 0.5
    activations = collect_activations(
        model, site, shown[1], verbs_of, positions=at["source_positions"]
    )
    means = mean_difference_basis(activations, shown[2] % 2)
    assert accuracy(means) <= accuracy(found) + 0.02


def test_number_is_found_at_the_noun_and_holds_for_other_nouns():
    model = trained(attracted=False, width=32, layers=2, steps=200)
    check(model, block(model), attracted=False)


@pytest.mark.slow
def test_number_is_found_past_another_noun():
    """Where attention takes it up: from which layer on it lies elsewhere is up to the training."""
    model = trained(attracted=True, width=64, layers=3, steps=400)
    check(model, Site("transformer.drop"), attracted=True)
