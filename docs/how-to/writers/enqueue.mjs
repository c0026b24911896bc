#!/usr/bin/env node
// Enqueue a post: node enqueue.mjs [--plain] QUEUE SLUG PATH MESSAGE [AUTHOR-NAME AUTHOR-EMAIL [SCHEDULED-FOR]]
// No packages. To use it as a module: import { enqueue } from "./enqueue.mjs".
import { randomUUID } from "node:crypto";
import { realpathSync } from "node:fs";
import { mkdir, open, rename, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

// `more` may have author: { name, email } and scheduledFor: "2026-01-31T09:00:00+01:00".
const newJob = (slug, paths, message, more) => ({
  id: randomUUID(),
  slug,
  paths,
  message,
  createdAt: new Date().toISOString(),
  ...more,
});

// Recommended: write the job aside, then rename it into the queue. The worker never sees half a file.
export async function enqueue(queue, slug, paths, message, more = {}) {
  const job = newJob(slug, paths, message, more);
  await mkdir(queue, { recursive: true });
  const aside = join(queue, `.${job.id}.tmp`);
  const file = await open(aside, "w");
  try {
    await file.writeFile(JSON.stringify(job));
    await file.sync(); // a power cut after the rename must not leave an empty file
  } finally {
    await file.close();
  }
  await rename(aside, join(queue, `${job.id}.json`));
  return job.id;
}

// Survived: the worker leaves a half-written file alone for 2 seconds. If the producer dies in the middle,
// the worker then moves the file into the quarantine, so prefer the function above.
export async function enqueuePlain(queue, slug, paths, message, more = {}) {
  const job = newJob(slug, paths, message, more);
  await mkdir(queue, { recursive: true });
  await writeFile(join(queue, `${job.id}.json`), JSON.stringify(job));
  return job.id;
}

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  const words = process.argv.slice(2);
  const plain = words[0] === "--plain" && words.shift();
  const [queue, slug, path, message, name, email, scheduledFor] = words;
  if (![4, 6, 7].includes(words.length)) {
    console.error("usage: enqueue.mjs [--plain] QUEUE SLUG PATH MESSAGE [AUTHOR-NAME AUTHOR-EMAIL [SCHEDULED-FOR]]");
    process.exit(1);
  }
  const more = { ...(name && { author: { name, email } }), ...(scheduledFor && { scheduledFor }) };
  console.log(await (plain ? enqueuePlain : enqueue)(queue, slug, [path], message, more));
}
