package co.cask.cdap.messaging.store.leveldb;

import co.cask.cdap.api.dataset.lib.CloseableIterator;
import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.common.conf.Constants.MessagingSystem;
import co.cask.cdap.messaging.TopicMetadata;
import co.cask.cdap.messaging.store.MessageTable;
import co.cask.cdap.messaging.store.MetadataTable;
import co.cask.cdap.messaging.store.PayloadTable;
import interop.Store;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import org.iq80.leveldb.DB;

/**
 * A TMS data directory, which CDAP's factory opens. The class is in CDAP's package because the classes of the tables,
 * which also prune, are not public.
 */
public final class LevelDbStore implements Store {
  private final LevelDBMetadataTable metadata;
  private final LevelDBMessageTable messages;
  private final LevelDBPayloadTable payloads;

  /**
   * Opens each table with a separate factory: the cleanup thread of a factory prunes by the system clock once the
   * factory has opened all three tables, and a reader must not delete rows.
   */
  public LevelDbStore(CConfiguration conf) throws IOException {
    metadata = (LevelDBMetadataTable) new LevelDBTableFactory(conf)
        .createMetadataTable(conf.get(MessagingSystem.METADATA_TABLE_NAME));
    messages = (LevelDBMessageTable) new LevelDBTableFactory(conf)
        .createMessageTable(conf.get(MessagingSystem.MESSAGE_TABLE_NAME));
    payloads = (LevelDBPayloadTable) new LevelDBTableFactory(conf)
        .createPayloadTable(conf.get(MessagingSystem.PAYLOAD_TABLE_NAME));
  }

  @Override
  public List<TopicMetadata> topics() throws IOException {
    List<TopicMetadata> topics = new ArrayList<>();
    try (CloseableIterator<TopicMetadata> rows = metadata.scanTopics()) {
      rows.forEachRemaining(topics::add);
    }
    return topics;
  }

  /** Runs CDAP's cleanup once, in the order of its thread, at the given time. */
  public void prune(long nowMs) throws IOException {
    try (CloseableIterator<TopicMetadata> rows = metadata.scanTopics()) {
      while (rows.hasNext()) {
        TopicMetadata topic = rows.next();
        messages.pruneMessages(topic, nowMs);
        payloads.pruneMessages(topic, nowMs);
      }
    }
  }

  /** Returns the LevelDB handle of a table: {@code meta}, {@code message} or {@code payload}. */
  public DB database(String table) {
    return switch (table) {
      case "meta" -> handle(metadata);
      case "message" -> handle(messages);
      case "payload" -> handle(payloads);
      default -> throw new IllegalArgumentException("no table '" + table + "': meta, message or payload");
    };
  }

  /** Closes the handles, which CDAP never does, so that another process finds complete files. */
  @Override
  public void close() throws IOException {
    database("meta").close();
    database("message").close();
    database("payload").close();
  }

  @Override
  public MetadataTable createMetadataTable(String tableName) {
    return metadata;
  }

  @Override
  public MessageTable createMessageTable(String tableName) {
    return messages;
  }

  @Override
  public PayloadTable createPayloadTable(String tableName) {
    return payloads;
  }

  /** Returns the private handle of a table, the only way to read raw rows with CDAP's options. */
  private static DB handle(Object table) {
    try {
      var field = table.getClass().getDeclaredField("levelDB");
      field.setAccessible(true);
      return (DB) field.get(table);
    } catch (ReflectiveOperationException e) {
      throw new IllegalStateException("not the table class of CDAP 5.1.2: " + table.getClass(), e);
    }
  }
}
