# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde user`: make accounts, look at them, and change their roles and balances."""

import argparse
import json
from decimal import Decimal, InvalidOperation
from uuid import uuid4

from sqlalchemy.orm import Session

from horde import db, redis_ctrl
from horde.actions import user_changes
from horde.actions.actors import OPERATOR
from horde.actions.acts import record_act
from horde.classes.base.kudos import to_kudos
from horde.classes.base.user import UserRoleTypes
from horde.cli._operating import CommandRefused, run_on_database
from horde.cli._words import Found, add_json_option, add_reason_option, run_word, to_facts
from horde.clock import utcnow
from horde.config import Config
from horde.database import users
from horde.database.kudos import fold_postings, get_effective_kudos
from horde.shapes.acts import ModeratorAction
from horde.shapes.users import MAX_ADJUSTMENT, MAX_USERNAME_LENGTH
from horde.shown_text import clean_username

EXIT_REFUSED = 1
MOST_LISTED = 1000
ROLES = [role.name.lower() for role in UserRoleTypes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions. A user is named by id or alias (name#id)."""
    actions = parser.add_subparsers(dest="action", required=True)
    create = actions.add_parser("create", help="make an account; prints {id, alias, api_key}")
    create.add_argument("--username", required=True, type=parse_username)
    create.add_argument("--trusted", action="store_true", help="rewards go straight to the balance")
    create.add_argument(
        "--moderator", action="store_true", help="administers users and workers; implies --trusted"
    )
    create.add_argument(
        "--kudos", type=parse_kudos, default=Decimal(0), metavar="N", help="kudos to start with"
    )
    listing = actions.add_parser("list", help="list accounts, the newest first")
    listing.add_argument("--role", choices=ROLES, help="those with this role alone")
    listing.add_argument(
        "--limit", type=parse_limit, default=100, metavar="N", help="at most (%(default)s)"
    )
    show = actions.add_parser("show", help="show one account")
    show.add_argument("user")
    for reading in (listing, show):
        reading.add_argument("--json", action="store_true", help="print JSON instead of text")
    role = actions.add_parser("role", help="grant a role; prints {id, alias, roles}")
    role.add_argument("user")
    role.add_argument("role", choices=ROLES)
    role.add_argument("--remove", action="store_true", help="revoke it instead")
    delete = actions.add_parser(
        "delete", help="mark an account for deletion; again after 30 days, erase it"
    )
    delete.add_argument("user")
    add_reason_option(delete)
    add_json_option(delete)
    key = actions.add_parser("key", help="give a new key, which ends the old one; prints {api_key}")
    key.add_argument("user")
    kudos = actions.add_parser("kudos", help="add to a balance; prints {id, alias, kudos}")
    kudos.add_argument("user")
    kudos.add_argument("delta", type=parse_kudos, help="may be negative")


def parse_username(text: str) -> str:
    """A name as it is stored."""
    username = clean_username(text)
    if not 1 <= len(username) <= MAX_USERNAME_LENGTH:
        raise argparse.ArgumentTypeError(
            f"a username has 1 to {MAX_USERNAME_LENGTH} visible characters"
        )
    return username


def parse_kudos(text: str) -> Decimal:
    """An amount within what one change may move."""
    try:
        amount = Decimal(text)
    except InvalidOperation:
        raise argparse.ArgumentTypeError("kudos are a number") from None
    if not amount.is_finite() or abs(amount) > MAX_ADJUSTMENT:
        raise argparse.ArgumentTypeError(f"at most {MAX_ADJUSTMENT} kudos at once")
    return to_kudos(amount)


def parse_limit(text: str) -> int:
    """How many accounts are listed."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_LISTED:
        raise argparse.ArgumentTypeError(f"a number from 1 to {MOST_LISTED}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Do what was asked and print the result on stdout; the exit code."""
    if args.action == "delete":
        return run_word("user", args, lambda: delete(args))
    makes_key = args.action in {"create", "key"}
    act = read if args.action in {"list", "show"} else change
    return run_on_database(
        "user",
        lambda config: act(config, args),
        refused_code=EXIT_REFUSED,
        uses_keys=makes_key,
    )


def change(config: Config, args: argparse.Namespace) -> int:
    """Change accounts in one transaction and print the result as JSON."""
    act = {"create": create, "key": reset_key, "role": change_role, "kudos": change_kudos}[
        args.action
    ]
    # running servers learn of the change through it; without it within seconds
    redis_ctrl.connect(config)
    users.configure(config)
    result = db.run_transaction(lambda session: act(session, args))
    fold_postings()  # the servers do it within a second, but there may be none yet
    print(json.dumps(result))
    return 0


def read(_config: Config, args: argparse.Namespace) -> int:
    """Print accounts, as JSON or as lines for people."""
    with db.reading() as session:
        if args.action == "list":
            accounts = list_accounts(session, args)
            print(json.dumps(accounts) if args.json else build_table(accounts))
        else:
            account = show_account(session, args)
            print(json.dumps(account) if args.json else build_lines(account))
    return 0


def list_accounts(session: Session, args: argparse.Namespace) -> list[dict[str, object]]:
    """The newest accounts."""
    role = None if args.role is None else UserRoleTypes[args.role.upper()]
    return [build_facts(each) for each in users.list_accounts(session, role=role, limit=args.limit)]


def show_account(session: Session, args: argparse.Namespace) -> dict[str, object]:
    """All that an operator may want to know of one account; no key, which nobody can read back."""
    account = require_account(session, args.user)
    return {
        **build_facts(account),
        "created": account.created.isoformat(sep=" ", timespec="seconds"),
        "is_pseudonymous": account.is_pseudonymous,
        "kudos_unfolded": float(get_effective_kudos(session, account.id)),
        "concurrency": account.concurrency,
        "worker_invited": account.worker_invited,
        "public_workers": account.public_workers,
        "usage_multiplier": account.usage_multiplier,
    }


def build_facts(account: users.Caller) -> dict[str, object]:
    """What a list shows of an account."""
    return {
        "id": account.id,
        "alias": account.alias,
        "kudos": account.kudos,
        "roles": sorted(role.name.lower() for role in account.roles),
    }


def build_table(rows: list[dict[str, object]]) -> str:
    """One line an account."""
    return "\n".join(
        f"{row['id']:>8}  {row['alias']:<40}  {row['kudos']:>14}  {describe(row['roles'])}".rstrip()
        for row in rows
    )


def build_lines(facts: dict[str, object]) -> str:
    """One line a fact."""
    return "\n".join(f"{name + ':':<18}{describe(value)}" for name, value in facts.items())


def describe(value: object) -> str:
    """A value for people."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def delete(args: argparse.Namespace) -> Found:
    """Mark an account, or erase a marked one."""
    with db.reading() as session:
        account = require_account(session, args.user)
    deleted = user_changes.delete_user(OPERATOR, str(account.id), args.reason)
    return {"id": account.id, "alias": account.alias, **to_facts(deleted)}


def reset_key(session: Session, args: argparse.Namespace) -> dict[str, object]:
    """Give an account a new key, as when the old one is lost or leaked."""
    account = require_account(session, args.user)
    api_key = users.reset_api_key(session, account.id)
    record_act(session, OPERATOR, ModeratorAction.KEY_RESET, user_changes.describe_user(account.id))
    return {"id": account.id, "alias": account.alias, "api_key": api_key}


def create(session: Session, args: argparse.Namespace) -> dict[str, object]:
    """Make an account. Its identity is made up, so no provider's login can claim it."""
    now = utcnow()
    made = users.create_user(
        session, username=args.username, oauth_id=f"local_{uuid4().hex}", now=now
    )
    for role, wanted in (
        (UserRoleTypes.MODERATOR, args.moderator),
        (UserRoleTypes.TRUSTED, args.trusted),
    ):
        if wanted:
            users.set_role(session, made.user.id, role, granted=True, now=now)
    if args.kudos:
        users.adjust_kudos(session, made.user.id, args.kudos, action="admin", now=now)
    return {"id": made.user.id, "alias": made.user.alias, "api_key": made.api_key}


def change_role(session: Session, args: argparse.Namespace) -> dict[str, object]:
    """Grant or revoke a role."""
    account = require_account(session, args.user)
    users.set_role(
        session, account.id, UserRoleTypes[args.role.upper()], granted=not args.remove, now=utcnow()
    )
    roles = require_account(session, args.user).roles
    return {
        "id": account.id,
        "alias": account.alias,
        "roles": sorted(role.name.lower() for role in roles),
    }


def change_kudos(session: Session, args: argparse.Namespace) -> dict[str, object]:
    """Add to a balance."""
    account = require_account(session, args.user)
    users.adjust_kudos(session, account.id, args.delta, action="admin", now=utcnow())
    return {
        "id": account.id,
        "alias": account.alias,
        "kudos": float(get_effective_kudos(session, account.id)),
    }


def require_account(session: Session, name: str) -> users.Caller:
    """The account with this id or alias; raises CommandRefused."""
    user_id = users.parse_user_id(name)
    if user_id is None and (user := users.find_user_by_alias(session, name)) is not None:
        user_id = user.id
    account = None if user_id is None else users.find_account(session, user_id)
    if account is None:
        raise CommandRefused(f"there is no user {name}")
    return account
