# SPDX-License-Identifier: AGPL-3.0-or-later
"""What text costs and earns: pure arithmetic over numbers, and the movements that book it.

Amounts are kudos with two decimals, lengths are tokens, multipliers are billions of parameters (1
for a model that the reference does not know). Source: docs/explanation/kudos.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from uuid import UUID

from horde.classes.base.kudos import (
    Account,
    Currency,
    EntryType,
    Movements,
    Statistic,
    StatTarget,
    to_kudos,
)
from horde.classes.base.user import UserRecordTypes

# For pricing; sizing a prompt against a context uses its own, more careful divisor.
CHARACTERS_PER_TOKEN = 4
MINIMUM_REPLY_TOKENS = 20

REFERENCE_MULTIPLIER = 13  # the 13B model the formulas were balanced around
REWARD_DIVISOR = 125
QUOTE_DIVISOR = 100  # a quote is deliberately above the charge
UPFRONT_DIVISOR = 21
UPFRONT_KUDOS_WITHOUT_MODEL = 20
UNVALIDATED_FACTOR = 0.3
UNKNOWN_MODEL_MULTIPLIER = 2.7  # what a model outside the reference counts as
TARGETED_KUDOS = Decimal("0.1")

GENERATION_BURN = Decimal(1)  # paid by the requester on top of each generation, to nobody
ACTIVATION_TAX = Decimal(1)
IMAGE_KUDOS = Decimal(5)  # each image of a chat request
STYLE_KUDOS = Decimal(2)  # for a style of somebody else, who gets them

UPTIME_BASE_KUDOS = 25
UPTIME_KUDOS_PER_KIBITOKEN = 15  # of context offered
UPTIME_MAX_CONTEXT = 262144
UPTIME_UNKNOWN_MODEL_FACTOR = 0.5
UPTIME_REFERENCE_MULTIPLIER = 7

TEXT_RECORD = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowanceLimits:
    """How the free output allowance falls: tokens at either end, and the waits at which it starts
    and stops falling.
    """

    ceiling_tokens: int
    floor_tokens: int
    full_wait_seconds: float
    floor_wait_seconds: float


def count_text_tokens(characters: int, max_length: int) -> int:
    """Tokens that a text of so many characters counts for. The cap comes last: `max_length` 16
    counts 16.
    """
    return min(max(math.ceil(characters / CHARACTERS_PER_TOKEN), MINIMUM_REPLY_TOKENS), max_length)


def compute_context_multiplier(tokens: int) -> float:
    """How much dearer a token gets with the length of what precedes it: 2.2 at 1024 tokens, at most
    30.
    """
    growth = math.pow(2.2, math.log2(tokens / 1024)) if tokens > 0 else 0.0
    return min(max(1.2 + growth, 0.1), 30.0)


def compute_size_bonus(multiplier: float) -> float:
    """A bonus for models above the reference size; 1 up to it."""
    return math.pow(max(multiplier, REFERENCE_MULTIPLIER) / REFERENCE_MULTIPLIER, 0.20)


def compute_text_kudos(
    *,
    reply_tokens: int,
    prompt_tokens: int,
    multiplier: float,
    is_known: bool,
    owner_trusted: bool,
    validated: bool,
    targeted: bool = False,
) -> Decimal:
    """What one generation earns its worker, and costs its requester before the burn.

    Both token counts are those of `count_text_tokens`, so the prompt counts up to the requested
    output length only. `targeted`: the horde requires matched targeting and the request lists
    workers.
    """
    if reply_tokens <= 0:
        return Decimal("0.00")
    if targeted:
        return to_kudos(TARGETED_KUDOS)
    context = compute_context_multiplier(prompt_tokens)
    if is_known:
        validation = 1.0 if validated else UNVALIDATED_FACTOR
        return to_kudos(
            context
            * validation
            * reply_tokens
            * compute_size_bonus(multiplier)
            * multiplier
            / REWARD_DIVISOR
        )
    if owner_trusted:
        return to_kudos(reply_tokens * context * UNKNOWN_MODEL_MULTIPLIER / 100)
    return to_kudos(context)  # a made-up model name must not be a way to earn


def compute_text_quote(
    *,
    max_length: int,
    max_context_length: int,
    models: Sequence[tuple[float, bool]],
    n: int,
    image_count: int = 0,
) -> Decimal:
    """The estimate a requester is told: full output, full context, the first listed model. Not
    rounded to whole kudos.

    `models` are (multiplier, is known) in the listed order. Leaves out what a style adds.
    """
    context = compute_context_multiplier(max_context_length)
    if not models:
        job = max_length * REFERENCE_MULTIPLIER * context / QUOTE_DIVISOR
    elif models[0][1]:
        multiplier = models[0][0]
        job = max_length * compute_size_bonus(multiplier) * multiplier * context / QUOTE_DIVISOR
    else:
        job = max_length * UNKNOWN_MODEL_MULTIPLIER / 100 * context
    return (to_kudos(job) + GENERATION_BURN) * n + compute_activation_tax(image_count)


def round_quote(quote: Decimal) -> int:
    """The whole number shown as a request's price, and compared with `horde.max_kudos`."""
    return round(quote)


def compute_activation_tax(image_count: int = 0, *, is_styled: bool = False) -> Decimal:
    """What a request pays once when it is queued; it is never refunded.

    Nobody earns it, but for what a style adds: `is_styled` is a style of somebody else.
    """
    return ACTIVATION_TAX + IMAGE_KUDOS * image_count + (STYLE_KUDOS if is_styled else Decimal(0))


def compute_upfront_estimate(*, max_length: int, multipliers: Sequence[float], n: int) -> Decimal:
    """Kudos to hold for a request above its free allowance; the dearest listed model decides."""
    if not multipliers:
        return to_kudos(UPFRONT_KUDOS_WITHOUT_MODEL * n)
    return to_kudos(max_length * max(multipliers) / UPFRONT_DIVISOR) * n


def compute_uptime_reward(
    *, max_context_length: int, multiplier: float, is_known: bool, validated: bool
) -> Decimal:
    """What a worker earns for each uptime period, by its first model and the context it offers."""
    base = (
        UPTIME_BASE_KUDOS
        + UPTIME_KUDOS_PER_KIBITOKEN * min(max_context_length, UPTIME_MAX_CONTEXT) / 1024
    )
    if not is_known:
        return to_kudos(base * UPTIME_UNKNOWN_MODEL_FACTOR)
    validation = 1.0 if validated else UNVALIDATED_FACTOR
    return to_kudos(base * max(multiplier / UPTIME_REFERENCE_MULTIPLIER, 0.25) * validation)


def compute_free_output_allowance(wait_seconds: float | None, limits: AllowanceLimits) -> int:
    """Output, in tokens, that needs no kudos beforehand; a wait of None means that no worker is
    eligible.

    Between the two waits of the limits it drops evenly from the ceiling to the floor.
    Source: docs/reference/chat_requests.md, "Free output allowance".
    """
    if wait_seconds is not None and wait_seconds <= limits.full_wait_seconds:
        return limits.ceiling_tokens
    if wait_seconds is None or wait_seconds >= limits.floor_wait_seconds:
        return limits.floor_tokens
    waited = (wait_seconds - limits.full_wait_seconds) / (
        limits.floor_wait_seconds - limits.full_wait_seconds
    )
    return round(limits.ceiling_tokens - waited * (limits.ceiling_tokens - limits.floor_tokens))


def estimate_queue_wait_seconds(
    *,
    competing_tokens: float,
    competing_jobs: int,
    tokens_per_second: float,
    eligible_threads: int,
    running_seconds: float = 0.0,
) -> int:
    """Seconds until the competing work is done, for the status route and the free allowance alike.

    `tokens_per_second` is the sum over the eligible workers, each counted once per thread; fewer
    jobs than threads leave threads idle. `running_seconds` is the longest remaining time of the
    request's own running jobs (status only). Leaves out work that arrives later.
    """
    busy_threads = min(competing_jobs, eligible_threads)
    throughput = (
        tokens_per_second * busy_threads / eligible_threads if eligible_threads > 0 else 0.0
    )
    return round(competing_tokens / (throughput or 1.0) + running_seconds)


def build_generation_movements(
    *,
    kudos: Decimal,
    max_length: int,
    worker_id: UUID,
    owner_id: int,
    owner_trusted: bool,
    requester_id: int,
    requester_usage_multiplier: float,
    reservation_id: str | None,
    censored: bool = False,
) -> Movements:
    """What a settled generation moves: the reward, the requester's charge with its burn, records
    and display totals.

    `owner_trusted` is true for Anonymous too; anyone else's half waits in escrow. A censored reply
    pays the worker in full and costs the requester the burn alone. `reservation_id` is the hold the
    charge consumes.
    """
    charge = compute_generation_charge(kudos, censored=censored)
    currencies = (
        *_build_reward(owner_id, kudos, owner_trusted, EntryType.GENERATION),
        Currency(
            user_id=requester_id,
            entry_type=EntryType.GENERATION,
            amount=-charge,
            reservation_id=reservation_id,
        ),
    )
    return Movements(
        currencies=currencies,
        statistics=(
            *_build_accumulated(currencies),
            _build_record(owner_id, UserRecordTypes.FULFILLMENT, Decimal(1), EntryType.STAT_RECORD),
            _build_record(
                owner_id,
                UserRecordTypes.CONTRIBUTION,
                Decimal(max_length),
                EntryType.STAT_CONTRIBUTION,
            ),
            *_build_request_records(requester_id, max_length, requester_usage_multiplier),
            *_build_worker_earnings(worker_id, kudos, "generated", EntryType.GENERATION),
            _build_worker_counter(worker_id, "contributions", Decimal(max_length)),
            _build_worker_counter(worker_id, "fulfilments", Decimal(1)),
        ),
    )


def compute_generation_charge(kudos: Decimal, *, censored: bool = False) -> Decimal:
    """What a requester pays for a generation that earned `kudos`: also off a shared key and onto
    the request's total.
    """
    return (Decimal(0) if censored else kudos) + GENERATION_BURN


def build_activation_movements(
    *,
    requester_id: int,
    tax: Decimal,
    usage_multiplier: float = 1.0,
    reservation_id: str | None = None,
    style_author_id: int | None = None,
) -> Movements:
    """What queueing a request moves: the tax, and one more request with no usage yet. Of the tax
    `style_author_id` gets what a style costs, the rest nobody.
    """
    currencies = (
        Currency(
            user_id=requester_id,
            entry_type=EntryType.GENERATION,
            amount=-tax,
            reservation_id=reservation_id,
        ),
        *_build_style_reward(style_author_id),
    )
    return Movements(
        currencies=currencies,
        statistics=(
            *_build_accumulated(currencies),
            *_build_request_records(requester_id, 0, usage_multiplier),
            *_build_style_records(style_author_id),
        ),
    )


def _build_style_reward(author_id: int | None) -> tuple[Currency, ...]:
    if author_id is None:
        return ()
    return (Currency(user_id=author_id, entry_type=EntryType.STYLE_REWARD, amount=STYLE_KUDOS),)


def _build_style_records(author_id: int | None) -> tuple[Statistic, ...]:
    if author_id is None:
        return ()
    styled = Statistic(
        entry_type=EntryType.STYLE_REWARD,
        target=StatTarget.USER_STATS,
        name="styled",
        amount=STYLE_KUDOS,
        user_id=author_id,
    )
    used = _build_record(author_id, UserRecordTypes.STYLE, Decimal(1), EntryType.STAT_RECORD)
    return styled, used


def build_uptime_movements(
    *, kudos: Decimal, worker_id: UUID, owner_id: int, owner_trusted: bool
) -> Movements:
    """What an uptime reward moves: all to the balance of a trusted owner, all to the escrow of any
    other.
    """
    account = Account.BALANCE if owner_trusted else Account.ESCROW
    currencies = (
        Currency(
            user_id=owner_id, entry_type=EntryType.UPTIME_REWARD, amount=kudos, account=account
        ),
    )
    return Movements(
        currencies=currencies,
        statistics=(
            *_build_accumulated(currencies),
            *_build_worker_earnings(worker_id, kudos, "uptime", EntryType.UPTIME_REWARD),
        ),
    )


def _build_reward(
    owner_id: int, kudos: Decimal, owner_trusted: bool, entry_type: EntryType
) -> tuple[Currency, ...]:
    escrow = Decimal(0) if owner_trusted else to_kudos(kudos / 2)
    parts = ((Account.BALANCE, kudos - escrow), (Account.ESCROW, escrow))
    return tuple(
        Currency(user_id=owner_id, entry_type=entry_type, amount=amount, account=account)
        for account, amount in parts
        if amount
    )


def _build_accumulated(currencies: Sequence[Currency]) -> tuple[Statistic, ...]:
    """The display total that follows balances; escrow joins it when it is promoted."""
    return tuple(
        Statistic(
            entry_type=currency.entry_type,
            target=StatTarget.USER_STATS,
            name="accumulated",
            amount=currency.amount,
            user_id=currency.user_id,
        )
        for currency in currencies
        if currency.account is Account.BALANCE and currency.amount
    )


def _build_record(
    user_id: int, kind: UserRecordTypes, amount: Decimal, entry_type: EntryType
) -> Statistic:
    return Statistic(
        entry_type=entry_type,
        target=StatTarget.USER_RECORDS,
        name=kind.name,
        record=TEXT_RECORD,
        amount=amount,
        user_id=user_id,
    )


def _build_request_records(
    user_id: int, usage_tokens: int, usage_multiplier: float
) -> tuple[Statistic, ...]:
    request = _build_record(user_id, UserRecordTypes.REQUEST, Decimal(1), EntryType.STAT_RECORD)
    usage = to_kudos(usage_tokens * usage_multiplier)
    return (
        (request, _build_record(user_id, UserRecordTypes.USAGE, usage, EntryType.STAT_RECORD))
        if usage
        else (request,)
    )


def _build_worker_earnings(
    worker_id: UUID, kudos: Decimal, action: str, entry_type: EntryType
) -> tuple[Statistic, ...]:
    if not kudos:
        return ()
    return (
        Statistic(
            entry_type=entry_type,
            target=StatTarget.WORKERS,
            name="kudos",
            amount=kudos,
            worker_id=worker_id,
        ),
        Statistic(
            entry_type=entry_type,
            target=StatTarget.WORKER_STATS,
            name=action,
            amount=kudos,
            worker_id=worker_id,
        ),
    )


def _build_worker_counter(worker_id: UUID, name: str, amount: Decimal) -> Statistic:
    return Statistic(
        entry_type=EntryType.STAT_CONTRIBUTION,
        target=StatTarget.WORKERS,
        name=name,
        amount=amount,
        worker_id=worker_id,
    )
