#!/usr/bin/env node
// Ask the worker to publish a post: node enqueue.mjs [--plain] QUEUE SLUG PATH MESSAGE. No packages.
import { randomUUID } from "node:crypto";
import { mkdir, open, rename, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const newJob = (slug, paths, message) => ({
  id: randomUUID(),
  slug,
  paths,
  message,
  createdAt: new Date().toISOString(),
});

// Recommended: write the job aside, then rename it into the queue. The worker never sees half a file.
export async function enqueue(queue, slug, paths, message) {
  const job = newJob(slug, paths, message);
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

// Survived: the worker leaves a half-written file alone for 2 seconds. A writer that dies in the middle
// leaves a file that is then put aside as unreadable, so prefer the one above.
export async function enqueuePlain(queue, slug, paths, message) {
  const job = newJob(slug, paths, message);
  await mkdir(queue, { recursive: true });
  await writeFile(join(queue, `${job.id}.json`), JSON.stringify(job));
  return job.id;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const words = process.argv.slice(2);
  const plain = words[0] === "--plain" && words.shift();
  const [queue, slug, path, message] = words;
  console.log(await (plain ? enqueuePlain : enqueue)(queue, slug, [path], message));
}
