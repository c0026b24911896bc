#!/usr/bin/env php
<?php
// Ask the worker to publish a post: php enqueue.php QUEUE SLUG PATH MESSAGE. PHP 8.1 or newer, no packages.
declare(strict_types=1);

/** Writes the job aside, then renames it into the queue: the worker never sees half a file. */
function enqueue(string $queue, string $slug, array $paths, string $message): string
{
    $id = bin2hex(random_bytes(16));
    $job = json_encode([
        'id' => $id,
        'slug' => $slug,
        'paths' => array_values($paths), // a list, also when keys are missing
        'message' => $message,
        'createdAt' => (new DateTimeImmutable('now', new DateTimeZone('UTC')))->format('Y-m-d\TH:i:s.v\Z'),
    ], JSON_THROW_ON_ERROR | JSON_UNESCAPED_UNICODE | JSON_UNESCAPED_SLASHES);

    if (!is_dir($queue) && !mkdir($queue, 0777, true) && !is_dir($queue)) {
        throw new RuntimeException("cannot make the folder $queue");
    }
    $aside = "$queue/.$id.tmp";
    $file = fopen($aside, 'wb');
    if ($file === false || fwrite($file, $job) !== strlen($job) || !fflush($file) || !fsync($file)) {
        throw new RuntimeException("cannot write $aside");
    }
    fclose($file);
    if (!rename($aside, "$queue/$id.json")) {
        throw new RuntimeException("cannot rename $aside");
    }
    return $id;
}

[, $queue, $slug, $path, $message] = $argv;
echo enqueue($queue, $slug, [$path], $message), "\n";
