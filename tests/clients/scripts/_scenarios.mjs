// SPDX-License-Identifier: AGPL-3.0-or-later
// What the scripts share: they print what they saw as one JSON object.

export const { HORDE_URL: URL, HORDE_KEY: KEY, HORDE_MODEL: MODEL } = process.env;
export const WRONG_KEY = "no-such-key-no-such-ke";

export const ask = (text) => [{ role: "user", content: text }];

export async function run(scenarios) {
  const seen = {};
  for (const [name, scenario] of Object.entries(scenarios)) {
    try {
      seen[name] = await scenario();
    } catch (error) {
      seen[name] = { raised: error.name, traceback: String(error.stack ?? error).slice(0, 3000) };
    }
  }
  console.log(JSON.stringify(seen));
}
