# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde user create|role|kudos`: make accounts, and change their roles and balances."""

import argparse
import json
import os
import sys
from decimal import Decimal, InvalidOperation
from uuid import uuid4

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from horde import db, redis_ctrl
from horde.classes.base.kudos import to_kudos
from horde.classes.base.user import MAX_USERNAME_LENGTH, UserRoleTypes
from horde.clock import utcnow
from horde.config import Config
from horde.database import users
from horde.database.kudos import fold_postings, get_effective_kudos
from horde.database.migrate import check_secret_key
from horde.exceptions import HordeError
from horde.logger import configure_logging

EXIT_REFUSED = 1
ROLES = [role.name.lower() for role in UserRoleTypes]


class UserRefused(Exception):
    """What was asked for cannot be done; the message says why."""


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
    role = actions.add_parser("role", help="grant a role; prints {id, alias, roles}")
    role.add_argument("user")
    role.add_argument("role", choices=ROLES)
    role.add_argument("--remove", action="store_true", help="revoke it instead")
    kudos = actions.add_parser("kudos", help="add to a balance; prints {id, alias, kudos}")
    kudos.add_argument("user")
    kudos.add_argument("delta", type=parse_kudos, help="may be negative")


def parse_username(text: str) -> str:
    """A name as it is stored."""
    username = users.clean_username(text)
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
    if not amount.is_finite() or abs(amount) > users.MAX_ADJUSTMENT:
        raise argparse.ArgumentTypeError(f"at most {users.MAX_ADJUSTMENT} kudos at once")
    return to_kudos(amount)


def run(args: argparse.Namespace) -> int:
    """Do what was asked and print the result as JSON on stdout; the exit code."""
    act = {"create": create, "role": change_role, "kudos": change_kudos}[args.action]
    config = Config.from_environment(os.environ)
    configure_logging(config.log_level, config.log_json)
    try:
        check_secret_key(db.connect(config), config.secret_key)
        # Running servers learn of the change through it; without it within seconds.
        redis_ctrl.connect(config)
        users.configure(config)
        result = db.run_transaction(lambda session: act(session, args))
        fold_postings()  # the servers do it within a second, but there may be none yet
    except (UserRefused, HordeError) as error:
        print(f"horde user: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except DBAPIError as error:
        print(f"horde user: {str(error.orig).strip()}", file=sys.stderr)
        return EXIT_REFUSED
    finally:
        db.disconnect()
        redis_ctrl.disconnect()
    print(json.dumps(result))
    return 0


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
    """The account with this id or alias; raises UserRefused."""
    user_id = users.parse_user_id(name)
    if user_id is None and (user := users.find_user_by_alias(session, name)) is not None:
        user_id = user.id
    account = None if user_id is None else users.find_account(session, user_id)
    if account is None:
        raise UserRefused(f"there is no user {name}")
    return account
